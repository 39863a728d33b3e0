"""What outlives a power cut, for each ``durability``, on both disk backends.

A power cut is played: of every file only the bytes are left that were synced last, and of every
directory the names; what was never synced is gone.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hicache.backends.lmdb.index import Index
from hicache.disk.options import DiskOptions, Durability
from hicache.testing.conformance import key, put, read, record
from tests.disk_child import BACKENDS
from tests.disks import MIB, Disk, FakeClock

pytestmark = pytest.mark.anyio
NBYTES = 50_000
NAMES = range(12)


class Power:
    """Keeps what was synced, in the order in which it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        """``data``, ``names``, ``names of all`` or ``index``."""
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        """Of directories and files by inode; a directory's names and their inodes."""
        datasync, sync, sync_index = os.fdatasync, os.fsync, Index.sync

        def note_data(fd: int) -> None:
            datasync(fd)
            self._note(fd)

        def note_any(fd: int) -> None:
            sync(fd)
            self._note(fd)

        def note_index(index: Index) -> None:
            sync_index(index)
            self.order.append("index")

        monkeypatch.setattr(os, "fdatasync", note_data)
        monkeypatch.setattr(os, "fsync", note_any)
        monkeypatch.setattr(Index, "sync", note_index)

    def cut(self, disk: Disk) -> None:
        """Leave of the store what was synced; its own directory and the format file stay."""
        before = disk.path.rename(disk.path.with_name("before"))
        disk.path.mkdir(mode=0o700)
        shutil.copy(before / "hicache-store", disk.path)
        for folder in ("objects", "segments"):
            if (before / folder).exists():
                self._restore((before / folder).stat().st_ino, disk.path / folder)
        shutil.rmtree(before)

    def _note(self, fd: int) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            is_topmost = os.readlink(f"/proc/self/fd/{fd}").endswith("objects")
            self.order.append("names of all" if is_topmost else "names")
            with os.scandir(fd) as entries:
                self._names[status.st_ino] = {one.name: one.inode() for one in entries}
        else:
            self.order.append("data")
            path = os.readlink(f"/proc/self/fd/{fd}")
            self._contents[status.st_ino] = Path(path).read_bytes()

    def _restore(self, inode: int, path: Path) -> None:
        if inode in self._names:
            path.mkdir(mode=0o700)
            for name, other in self._names[inode].items():
                self._restore(other, path / name)
        elif inode in self._contents:
            path.write_bytes(self._contents[inode])
            path.chmod(0o600)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=sorted(BACKENDS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return Disk(request.param, tmp_path / "store", FakeClock())


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Iterator[Power]:
    with monkeypatch.context() as patched:
        yield Power(patched)


def promise(disk: Disk, durability: Durability, interval_s: float = 3600) -> None:
    disk.options = DiskOptions(durability=durability, sync_interval_s=interval_s)


async def found_after(disk: Disk, power: Power) -> list[bool]:
    """Cut the power, open the store again and return which records are there, whole."""
    power.cut(disk)
    async with disk.opened() as backend:
        found = [await read(backend, name, NBYTES) for name in NAMES]
    assert all(one in (None, record(name, NBYTES)) for name, one in zip(NAMES, found, strict=True))
    return [one is not None for one in found]


async def test_commit_keeps_all_that_was_acknowledged(disk: Disk, power: Power) -> None:
    promise(disk, "commit")
    async with disk.opened() as backend:
        await put(backend, *NAMES[:6], nbytes=NBYTES)
        for name in NAMES[6:]:
            await put(backend, name, nbytes=NBYTES)

        assert await found_after(disk, power) == [True] * len(NAMES)


async def test_commit_syncs_data_before_the_name_that_shows_it(disk: Disk, power: Power) -> None:
    promise(disk, "commit")
    async with disk.opened() as backend:
        await put(backend, "first", nbytes=NBYTES)
        power.order.clear()

        await put(backend, "a", nbytes=NBYTES)

        expected = (
            ["data", "index"] if disk.kind == "lmdb" else ["data", "names", "names", "names of all"]
        )
        assert power.order == expected


async def test_commit_syncs_a_batch_once_where_it_is_one_write(disk: Disk, power: Power) -> None:
    promise(disk, "commit")
    async with disk.opened() as backend:
        await put(backend, "first", nbytes=1000)
        power.order.clear()

        await put(backend, *NAMES, nbytes=1000)

        num_data = 1 if disk.kind == "lmdb" else len(NAMES)
        assert power.order.count("data") == num_data


async def test_commit_keeps_what_an_eviction_moves(disk: Disk, power: Power) -> None:
    disk.budget_nbytes = 8 * MIB
    promise(disk, "commit")
    async with disk.opened() as backend:
        await put(backend, *NAMES, nbytes=NBYTES)
        for number in range(50):
            disk.clock.now += 60
            await backend.touch([key(name) for name in NAMES])
            await put(backend, ("other", number), nbytes=4 * NBYTES)
        assert (await backend.stats()).num_evicted > 0

        assert await found_after(disk, power) == [True] * len(NAMES)


async def test_interval_keeps_what_is_older_than_it(disk: Disk, power: Power) -> None:
    promise(disk, "interval", 0.05)
    async with disk.opened() as backend:
        await put(backend, *NAMES, nbytes=NBYTES)
        last = "index" if disk.kind == "lmdb" else "names of all"
        with anyio.fail_after(20):
            while power.order.count("data") == 0 or power.order[-1] != last:
                await anyio.sleep(0.01)

        assert await found_after(disk, power) == [True] * len(NAMES)


async def test_interval_waits_for_nothing_in_a_put(disk: Disk, power: Power) -> None:
    promise(disk, "interval")
    async with disk.opened() as backend:
        await put(backend, *NAMES, nbytes=NBYTES)

        assert power.order.count("data") == 0
    assert power.order.count("data") > 0, "closing keeps the promise"
    assert await found_after(disk, power) == [True] * len(NAMES)


async def test_none_never_waits_and_loses_the_last_records_only(disk: Disk, power: Power) -> None:
    promise(disk, "none")
    async with disk.opened() as backend:
        await put(backend, *NAMES, nbytes=NBYTES)
    assert power.order == []

    assert await found_after(disk, power) == [False] * len(NAMES)

    async with disk.opened() as backend:
        assert await put(backend, *NAMES, nbytes=NBYTES) == [True] * len(NAMES)
