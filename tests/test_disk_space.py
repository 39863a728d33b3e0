"""A disk that is full, nearly full, read-only, or smaller than the store: stores are what it costs.

Each on both disk backends, alone and below ``PageStore``.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

from hicache.backends.lmdb.index import Index
from hicache.disk import space
from hicache.disk.options import DiskOptions
from hicache.errors import StorageFull
from hicache.testing.conformance import key, put, read, record
from tests.disk_child import BACKENDS
from tests.disks import MIB, Disk, FakeClock
from tests.stores import World, page_refs

KINDS = sorted(BACKENDS)
NBYTES = 50_000
FULL = [
    *((kind, errno.errorcode[code]) for kind in KINDS for code in (errno.ENOSPC, errno.EDQUOT)),
    *((kind, "EROFS") for kind in KINDS),
    ("lmdb", "MDB_MAP_FULL"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return Disk(request.param, tmp_path / "store", FakeClock())


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, how: str) -> Iterator[None]:
    """Have the system refuse each write in that way."""

    def refuse(*_: Any) -> Any:
        if how == "MDB_MAP_FULL":
            raise lmdb.MapFullError(how)
        code = getattr(errno, how)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        if how == "MDB_MAP_FULL":
            patched.setattr(Index, "change", refuse)
        else:
            patched.setattr(os, "pwritev", refuse)
        yield


@pytest.mark.parametrize(("kind", "how"), FULL)
def test_s4_a_full_disk_is_told_once_and_storing_goes_on_when_there_is_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    how: str,
) -> None:
    caplog.set_level(logging.INFO)
    before, after = page_refs(3), page_refs(3, first_token=9000)
    with World(inner=BACKENDS[kind](tmp_path / "store", 64 * MIB)) as world:
        assert world.store_pages(before) == [True] * 3

        with refusing(monkeypatch, how):
            for _ in range(3):
                assert world.store_pages(after) == [False] * 3
                world.advance(6)
                world.wait_until(lambda: not world.store.stats().is_full)
                assert world.fetch_pages(before) == [True] * 3
            assert world.store_pages(after) == [False] * 3
            assert world.store.stats().is_up
        world.advance(6)
        world.wait_until(lambda: not world.store.stats().is_full)

        assert world.store_pages(after) == [True] * 3
        assert world.fetch_pages(after) == [True] * 3
    said = [line for line in caplog.messages if "no room" in line]
    assert len(said) == 1
    assert len([line for line in caplog.messages if "has room again" in line]) == 1


class Neighbours:
    """A file system of that many bytes, on which others have written some."""

    def __init__(self, disk: Disk, total_nbytes: int) -> None:
        self.others_nbytes = 0
        self._disk = disk
        self._total_nbytes = total_nbytes

    def statvfs(self, path: Any) -> SimpleNamespace:
        free = self._total_nbytes - self.others_nbytes - self._disk.nbytes()
        return SimpleNamespace(f_bavail=max(free, 0), f_frsize=1)


@pytest.mark.anyio
async def test_the_store_gives_way_where_others_fill_the_disk(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.options = DiskOptions(keep_free_gb=0.01)
    neighbours = Neighbours(disk, 64 * MIB)
    monkeypatch.setattr(space, "os", neighbours)
    async with disk.opened() as backend:
        for number in range(40):
            await put(backend, number, nbytes=10 * NBYTES)
            disk.clock.now += 60
        neighbours.others_nbytes = 40 * MIB

        assert await put(backend, "new", nbytes=NBYTES) == [True]

        assert neighbours.statvfs("").f_bavail >= 10e6 - 2 * NBYTES
        assert await read(backend, "new", NBYTES) == record("new", NBYTES)
        assert await backend.contains([key(0), key(39)]) == [False, True]
        neighbours.others_nbytes = 64 * MIB
        with pytest.raises(StorageFull, match="less free than it is to keep"):
            await put(backend, "newer", nbytes=NBYTES)
        neighbours.others_nbytes = 0
        assert await put(backend, "newer", nbytes=NBYTES) == [True]


@pytest.mark.anyio
async def test_a_size_beyond_the_disk_is_told_in_one_line(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.budget_nbytes = 900 * 10**12

    async with disk.opened() as backend:
        assert await put(backend, "a", nbytes=NBYTES) == [True]

    [said] = [line for line in caplog.messages if "its disk has room for" in line]
    assert said.startswith(f"{disk.path}: its size is 900000.0 GB")


@pytest.mark.anyio
async def test_a_size_that_fits_is_not_worth_a_word(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    async with disk.opened():
        pass

    assert not caplog.messages
