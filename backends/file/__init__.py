"""Local or network file system, one file a page.

A page appears under its name by ``rename``, so a crash leaves it whole or absent. What a power cut
may lose is the operator's choice (``DiskOptions``): by default the last pages, which costs misses,
and their frames and checksums catch the torn rest. Files are named by keys only, so nothing that
a user chose is in a name.

=================  ==============================================================
hicache-store      which kind of store this is, and of which version
usage              bytes and records, counted for all processes
objects/ab/cd/     records behind their frames, named by their keys in hex
tmp/               files being written; those of dead processes are swept at start
=================  ==============================================================

Small records cost one thread hop a batch. Records of 1 MiB and more are read by aiofiles, each on
its own, so that none waits for the batch. Several processes may have a directory open, on several
machines where the file system has locks; without them the budget is only nearly kept.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from typing_extensions import Buffer

from hicache.backends.file.files import Damaged
from hicache.backends.file.large import LargeRead
from hicache.backends.file.store import KIND, VERSION, Store
from hicache.disk.directory import default_budget, is_store, storage_error
from hicache.disk.options import DiskOptions
from hicache.disk.syncing import Periodic
from hicache.disk.threads import Threads
from hicache.disk.vector import nbytes_of
from hicache.errors import ConfigError, StorageUnavailable
from hicache.keys import PageKey
from hicache.storage import BackendOptions, StorageBackend, StorageStats, StoredRecord

T = TypeVar("T")

LARGE_NBYTES = 1024 * 1024
_LEAST_BUDGET_NBYTES = 64 * 1024
_NUM_THREADS = 4
_SHARDS_A_HOP = 64


class FileBackend(StorageBackend):
    """A directory of record files."""

    is_shared: ClassVar[bool] = True
    evicts_itself: ClassVar[bool] = True
    options_type: ClassVar[type[BackendOptions]] = DiskOptions

    def __init__(
        self,
        path: Path,
        budget_nbytes: int | None = None,
        *,
        clock: Callable[[], float] = time.time,
        options: DiskOptions | None = None,
    ) -> None:
        """``budget_nbytes`` bounds the sizes of all record files together, whoever writes them;
        by default half of what is free, at most 64 GB. ``clock`` gives seconds since 1970."""
        if budget_nbytes is not None and budget_nbytes < _LEAST_BUDGET_NBYTES:
            raise ConfigError(f"{path}: a store needs {_LEAST_BUDGET_NBYTES >> 10} KiB or more")
        self._path = path
        self._budget_nbytes = budget_nbytes
        self._clock = clock
        self._options = options or DiskOptions()
        self._syncing: Periodic | None = None
        self._store: Store | None = None
        self._readers: Threads | None = None
        self._writers: Threads | None = None

    @classmethod
    def create(
        cls, options: BackendOptions, *, path: Path | None, budget_nbytes: int | None
    ) -> Self:
        if path is None:
            raise ConfigError("the file backend needs a path")
        assert isinstance(options, DiskOptions)
        return cls(path, budget_nbytes, options=options)

    def is_there(self) -> bool:
        return is_store(self._path, KIND, VERSION)

    async def open(self, pool: Sequence[memoryview]) -> None:
        assert self._readers is None, "opened twice"
        self._readers = Threads("hicache-file-reader", _NUM_THREADS)
        self._writers = Threads("hicache-file-writer", _NUM_THREADS)
        try:
            self._store = await self._writers.run(self._open)
        except BaseException:
            await self.close()
            raise
        if self._options.durability == "interval":
            self._syncing = Periodic(self._options.sync_interval_s, self._sync)

    async def close(self) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            await syncing.close()
        store, readers, writers = self._store, self._readers, self._writers
        self._store = self._readers = self._writers = None
        for threads in (readers, writers):
            if threads is not None:
                threads.close()
        if store is not None:
            store.close()

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        is_large = [nbytes_of(buffers) >= LARGE_NBYTES for buffers in into]
        if all(is_large):
            return await self._get_large(keys, into)
        if not any(is_large):
            return await self._read(lambda store, threads: store.get(keys, into, threads))
        lengths: list[int | None] = [None] * len(keys)
        for wanted in (True, False):
            some = [at for at, large in enumerate(is_large) if large is wanted]
            found = await self.get([keys[at] for at in some], [into[at] for at in some])
            for at, length in zip(some, found, strict=True):
                lengths[at] = length
        return lengths

    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        return await self._write(lambda store, threads: store.put(items, threads))

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return await self._read(lambda store, threads: store.contains(keys))

    async def delete(self, keys: Sequence[PageKey]) -> None:
        await self._write(lambda store, threads: store.delete(keys))

    async def touch(self, keys: Sequence[PageKey]) -> None:
        await self._write(lambda store, threads: store.touch(keys))

    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        async for record in self.records(header_nbytes):
            if record.head is not None:
                yield record.key, record.head

    async def records(self, head_nbytes: int) -> AsyncIterator[StoredRecord]:
        shards = await self._read(lambda store, threads: store.files.shards())
        for start in range(0, len(shards), _SHARDS_A_HOP):
            some = shards[start : start + _SHARDS_A_HOP]
            for record in await self._read(_listed(some, head_nbytes)):
                yield record

    async def stats(self) -> StorageStats:
        return await self._read(lambda store, threads: store.stats())

    def _open(self) -> Store:
        budget_nbytes = self._budget_nbytes or default_budget(self._path)
        return self._guarded(lambda: Store(self._path, budget_nbytes, self._clock, self._options))

    async def _sync(self) -> None:
        await self._write(lambda store, threads: store.sync())

    async def _read(self, call: Callable[[Store, Threads], T]) -> T:
        store, threads = self._store, self._readers
        if store is None or threads is None:
            raise StorageUnavailable(f"{self._path}: not open")
        return await threads.run(self._guarded, lambda: call(store, threads))

    async def _write(self, call: Callable[[Store, Threads], T]) -> T:
        store, threads = self._store, self._writers
        if store is None or threads is None:
            raise StorageUnavailable(f"{self._path}: not open")

        return await threads.run(self._guarded, lambda: call(store, threads))

    async def _get_large(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        store, threads = self._store, self._readers
        if store is None or threads is None:
            raise StorageUnavailable(f"{self._path}: not open")
        try:
            found = await LargeRead(store.files, threads.executor).read(keys, into)
        except OSError as error:
            raise storage_error(error, self._path) from None
        lengths = [None if isinstance(length, Damaged) else length for length in found]
        lost = [
            (key, length.status if isinstance(length, Damaged) else None)
            for key, length in zip(keys, found, strict=True)
            if not isinstance(length, int)
        ]
        if lost:
            await self._read(lambda store, threads: store.forget(lost))
        return lengths

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except OSError as error:
            raise storage_error(error, self._path) from None


def _listed(shards: Sequence[str], nbytes: int) -> Callable[[Store, Threads], list[StoredRecord]]:
    return lambda store, threads: store.listed(shards, nbytes, threads)
