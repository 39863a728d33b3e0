"""Crashes, and other processes on the same store, on both disk backends."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.testing.conformance import put, read, record
from tests.disk_child import BACKENDS, CHURNED, CHURNED_NBYTES, written
from tests.disks import MIB, Disk, FakeClock

pytestmark = pytest.mark.anyio
KINDS = sorted(BACKENDS)
NBYTES = 50_000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return Disk(request.param, tmp_path / "store", FakeClock())


async def put_apart(disk: Disk, *names: str) -> None:
    """Put records so that none shares a file with another."""
    for name in names:
        async with disk.opened() as backend:
            await put(backend, name, nbytes=NBYTES)


def test_s4_a_limit_of_the_system_is_a_full_disk(disk: Disk) -> None:
    with disk.child("limited", 1) as child:
        assert child.stdout is not None
        said = child.stdout.read()

        assert child.wait() == 0
    words = said.replace(",", "").split()
    assert words[0::2] == ["full", "whole"]
    assert int(words[1]) > 0
    assert int(words[3]) > 0


async def test_r9_what_a_crash_left_behind_is_swept(disk: Disk) -> None:
    await put_apart(disk, "a")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    before = disk.nbytes()
    if disk.kind == "file":
        left = disk.path / "tmp" / f"{socket.gethostname()}~{dead.pid}~0~1~0.tmp"
        left.write_bytes(bytes(3 * NBYTES))
    else:
        segment, _ = disk.find(record("a", NBYTES))
        segment.with_name("0123456789abcdef.seg").write_bytes(bytes(3 * NBYTES))
        with open(segment, "ab") as file:
            file.write(bytes(NBYTES))
    unpublished = disk.path / f"hicache-store.{dead.pid}.tmp"
    unpublished.write_text("half of a li")

    async with disk.opened() as backend:
        assert not unpublished.exists()
        assert disk.nbytes() <= before + NBYTES // 2
        assert await read(backend, "a", NBYTES) == record("a", NBYTES)


async def test_a_temporary_file_that_goes_while_it_is_looked_at_stops_no_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk("file", tmp_path / "store", FakeClock())
    await put_apart(disk, "a")
    others = disk.path / "tmp" / f"{socket.gethostname()}~1~0~1~0.tmp"
    others.write_bytes(b"its writer renames it at that moment")
    monkeypatch.setattr(os, "kill", lambda pid, signal: others.unlink())

    async with disk.opened() as backend:
        assert await read(backend, "a", NBYTES) == record("a", NBYTES)


@pytest.mark.slow
async def test_s6_a_record_that_another_process_writes_is_whole_or_absent(disk: Disk) -> None:
    num_whole = 0
    with disk.child("churn", 7) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        async with disk.opened() as backend:
            for turn in range(150):
                for name in CHURNED:
                    found = await read(backend, name, CHURNED_NBYTES)
                    assert found in (None, record(name, CHURNED_NBYTES))
                    num_whole += found is not None
                if turn % 5 == 0:
                    await put(backend, turn % len(CHURNED), nbytes=CHURNED_NBYTES)
        child.stdin.close()
        assert child.wait() == 0

    assert num_whole > 0


@pytest.mark.slow
async def test_r7_r8_one_budget_holds_for_all_processes(disk: Disk) -> None:
    disk.budget_nbytes = 8 * MIB
    most = 0
    with disk.child("step", 1) as first, disk.child("step", 2) as second:
        for _ in range(60):
            for child in (first, second):
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
            for child in (first, second):
                most = max(most, disk.nbytes())
                assert child.stdout is not None
                assert child.stdout.readline()

    assert most <= disk.budget_nbytes


@pytest.mark.slow
async def test_s2_records_of_an_earlier_process_are_there(disk: Disk) -> None:
    with disk.child("write", 3) as child:
        assert child.stdout is not None
        accepted = [int(child.stdout.readline()) for _ in range(3)][-1]

    async with disk.opened() as backend:
        names = [written(3, number)[0] for number in range(accepted)]

        assert await backend.contains(names) == [True] * accepted
