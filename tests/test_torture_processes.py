"""Processes that are killed at any moment, and processes that share a store, on both backends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.disks import MIB, Disk, FakeClock
from tests.torture_child import BACKENDS, MOST_NBYTES, written

pytestmark = pytest.mark.anyio
CHILD = Path(__file__).with_name("torture_child.py")
BUDGETS = {"roomy": 1024 * MIB, "tight": 8 * MIB}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=sorted(BACKENDS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return Disk(request.param, tmp_path / "store", FakeClock())


@contextmanager
def nursery(disk: Disk) -> Iterator["subprocess.Popen[str]"]:
    """A process that starts others on the store."""
    with subprocess.Popen(
        [sys.executable, str(CHILD), disk.kind, str(disk.path), str(disk.budget_nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def tell(process: "subprocess.Popen[str]", line: str) -> int:
    """Start what the line says; return its process id."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(line, file=process.stdin, flush=True)
    word, pid = process.stdout.readline().split()
    assert word == "pid"
    return int(pid)


# ---------------------------------------------------------------- kill -9


class Killed:
    """Writers on one store, each of them killed; and what they had said by then."""

    def __init__(self, disk: Disk, random: Random) -> None:
        self.disk = disk
        self.random = random
        self.num_kept: dict[int, int] = {}
        """By seed: how many records were accepted."""
        self.deleted: dict[int, set[int]] = {}
        self.most_nbytes = 0

    def kill_one(self, process: "subprocess.Popen[str]", seed: int) -> None:
        """Let one write, and kill it: while it opens the store, or writes."""
        assert process.stdout is not None
        self.num_kept[seed], self.deleted[seed] = 0, set()
        pid = tell(process, f"write {seed}")
        for _ in range(self.random.choice([0, 1, 2, 5, 20])):
            self.note(seed, process.stdout.readline())
        time.sleep(self.random.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        while not (line := process.stdout.readline()).startswith("over"):
            self.note(seed, line)
        assert line == f"over {-signal.SIGKILL}\n"
        self.most_nbytes = max(self.most_nbytes, self.disk.nbytes())

    def note(self, seed: int, line: str) -> None:
        word, number = line.split()
        if word == "put":
            self.num_kept[seed] = int(number)
        else:
            self.deleted[seed].add(int(number))

    async def check(self, seeds: list[int]) -> int:
        """Open the store: what these accepted is whole, or absent where it may have been evicted;
        the rest is whole or absent. Return how many records were there."""
        num_there = 0
        async with self.disk.opened() as backend:
            for seed in seeds:
                records = [written(seed, number) for number in range(self.num_kept[seed] + 8)]
                buffers = [memoryview(bytearray(MOST_NBYTES)) for _ in records]
                lengths: list[int | None] = []
                for at in range(0, len(records), 128):
                    names = [name for name, _ in records[at : at + 128]]
                    lengths += await backend.get(names, [[one] for one in buffers[at : at + 128]])
                for number, ((_, data), length) in enumerate(zip(records, lengths, strict=True)):
                    is_promised = number < self.num_kept[seed] and self.is_roomy
                    if length is None:
                        assert not is_promised or number in self.deleted[seed], "it was accepted"
                    else:
                        assert bytes(buffers[number][:length]) == data, "a torn record was served"
                        num_there += 1
            scanned = [name async for name, _ in backend.scan(8)]
            assert len(scanned) == len(set(scanned))
            # What ``file`` counts is only put right when it next evicts.
            assert self.disk.kind == "file" or (await backend.stats()).num_records == len(scanned)
            self.most_nbytes = max(self.most_nbytes, self.disk.nbytes())
        return num_there

    @property
    def is_roomy(self) -> bool:
        return self.disk.budget_nbytes == BUDGETS["roomy"]

    async def empty(self) -> None:
        """Delete every record; nothing of them stays on disk."""
        async with self.disk.opened() as backend:
            names = [name async for name, _ in backend.scan(8)]
            for at in range(0, len(names), 128):
                await backend.delete(names[at : at + 128])
        records = [path for path in self.disk.files() if path.suffix in (".seg", ".tmp")]
        records += [path for path in self.disk.files() if len(path.name) == 64]
        assert records == [], "a file was leaked"


async def kill_many(disk: Disk, num_kills: int, budget: str) -> None:
    disk.budget_nbytes = BUDGETS[budget]
    killed = Killed(disk, Random(f"{disk.kind} {budget}"))
    with nursery(disk) as process:
        for seed in range(num_kills):
            killed.kill_one(process, seed)
            await killed.check([seed])
    num_there = await killed.check(list(range(num_kills)))
    await killed.empty()

    num_accepted = sum(killed.num_kept.values())
    print(
        f"{disk.kind}, {budget}: {num_kills} kills, {num_accepted} records accepted, "
        f"{num_there} there at the end, none torn; at most {killed.most_nbytes / MIB:.1f} MiB of "
        f"{disk.budget_nbytes / MIB:.0f} MiB on disk"
    )
    assert num_there > 0
    assert killed.most_nbytes <= disk.budget_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("budget", sorted(BUDGETS))
async def test_s3_killed_at_any_moment_nothing_accepted_is_lost_and_nothing_leaks(
    disk: Disk, budget: str
) -> None:
    await kill_many(disk, 20, budget)


@pytest.mark.soak
@pytest.mark.parametrize("budget", sorted(BUDGETS))
async def test_s3_killed_two_hundred_times(disk: Disk, budget: str, is_full: bool) -> None:
    await kill_many(disk, 200 if is_full else 10, budget)


# ---------------------------------------------------------------- two at once


def run_two(disk: Disk, seconds: float) -> None:
    """Let two processes use one store; neither errs, and the budget is kept at every look."""
    disk.budget_nbytes = BUDGETS["tight"]
    most_nbytes = num_looks = 0
    with nursery(disk) as first, nursery(disk) as second:
        for seed, process in enumerate((first, second)):
            tell(process, f"mix {seed} {seconds}")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            most_nbytes = max(most_nbytes, disk.nbytes())
            num_looks += 1
            time.sleep(0.01)
        said = []
        for process in (first, second):
            assert process.stdout is not None
            said.append(process.stdout.readline())
            assert said[-1].startswith("{"), said
            assert process.stdout.readline() == "over 0\n"

    counts = [json.loads(line) for line in said]
    print(
        f"{disk.kind}: two processes, {seconds:g} s: {counts}; at most {most_nbytes / MIB:.2f} of "
        f"{disk.budget_nbytes / MIB:.0f} MiB in {num_looks} looks"
    )
    assert most_nbytes <= disk.budget_nbytes
    assert all(count["read"] > 0 and count["written"] > 0 for count in counts)
    assert sum(count["evicted"] for count in counts) > 0


@pytest.mark.slow
async def test_s6_two_processes_read_write_and_evict_one_store(disk: Disk) -> None:
    run_two(disk, 6.0)


@pytest.mark.soak
async def test_s6_two_processes_do_so_for_a_minute(disk: Disk, is_full: bool) -> None:
    run_two(disk, 60.0 if is_full else 1.0)
