"""The default backend: an LMDB index and append-only segment files, on a local disk.

Payloads are read by ``preadv`` straight into pages and written by ``pwritev``; no payload is
mapped into memory, since a mapped file that somebody cuts short kills the process. A crash of
the process loses nothing. What a power cut may lose is the operator's choice (``DiskOptions``);
each record that it tears is found out by its frame or by ``PageStore``.

=============  ==================================================================
hicache-store  which kind of store this is, and of which version
lock           held shared by each process that has the store open
index          LMDB: key -> segment, offset, length, page number, stamp
segments/      records behind their frames; each file is written by one process
=============  ==================================================================

Several processes may have a store open, one ``LmdbBackend`` each.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from hicache.backends.lmdb.index import IndexLost, Snapshot
from hicache.backends.lmdb.store import KIND, LEAST_NBYTES, VERSION, Store, storage_errors
from hicache.disk.directory import default_budget, is_store
from hicache.disk.options import DiskOptions
from hicache.disk.syncing import Periodic
from hicache.disk.threads import Threads
from hicache.errors import ConfigError, StorageUnavailable
from hicache.keys import PageKey
from hicache.storage import BackendOptions, StorageBackend, StorageStats, StoredRecord

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SCAN_BATCH = 512
_MOST_READERS = 4


class LmdbBackend(StorageBackend):
    """A store in a directory of a local disk, shared by the processes of one machine."""

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
        """``budget_nbytes`` bounds the sizes of all its files together, index included; by
        default half of what is free, at most 64 GB. ``clock`` gives seconds since 1970."""
        if budget_nbytes is not None and budget_nbytes < LEAST_NBYTES:
            raise ConfigError(f"{path}: a store needs {LEAST_NBYTES >> 20} MiB or more")
        self._path = path
        self._budget_nbytes = budget_nbytes
        self._clock = clock
        self._options = options or DiskOptions()
        self._syncing: Periodic | None = None
        self._store: Store | None = None
        self._is_lost = False
        self._opening = asyncio.Lock()
        self._num_reads = 0
        self._writer: Threads | None = None
        self._readers: Threads | None = None

    @classmethod
    def create(
        cls, options: BackendOptions, *, path: Path | None, budget_nbytes: int | None
    ) -> Self:
        if path is None:
            raise ConfigError("the lmdb backend needs a path")
        assert isinstance(options, DiskOptions)
        return cls(path, budget_nbytes, options=options)

    def is_there(self) -> bool:
        return is_store(self._path, KIND, VERSION)

    async def open(self, pool: Sequence[memoryview]) -> None:
        assert self._writer is None, "opened twice"
        self._writer = Threads("hicache-lmdb-writer", 1)
        self._readers = Threads("hicache-lmdb-reader", min(os.cpu_count() or 1, _MOST_READERS))
        try:
            self._store = await self._writer.run(self._open)
        except BaseException:
            await self.close()
            raise
        if self._options.durability == "interval":
            self._syncing = Periodic(self._options.sync_interval_s, self._sync)

    async def close(self) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            await syncing.close()
        writer, readers, store = self._writer, self._readers, self._store
        self._writer = self._readers = self._store = None
        if readers is not None:
            readers.close()
        if writer is not None:
            if store is not None:
                await writer.run(store.close)
            writer.close()

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        return await self._read(lambda store, threads: store.get(keys, into, threads))

    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        return await self._write(lambda store: store.put(items))

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return await self._read(lambda store, threads: store.contains(keys))

    async def delete(self, keys: Sequence[PageKey]) -> None:
        await self._write(lambda store: store.delete(keys))

    async def touch(self, keys: Sequence[PageKey]) -> None:
        await self._write(lambda store: store.touch(keys))

    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        """Yield records in the order in which they lie on disk: parents mostly come first."""
        async for record in self.records(header_nbytes):
            if record.head is not None:
                yield record.key, record.head

    async def records(self, head_nbytes: int) -> AsyncIterator[StoredRecord]:
        """Yield records in the order in which they lie on disk."""
        snapshot, order = await self._read(lambda store, threads: store.snapshot())
        for start in range(0, len(order), _SCAN_BATCH):
            batch = order[start : start + _SCAN_BATCH]
            for record in await self._read(_listed(snapshot, batch, head_nbytes)):
                yield record

    async def stats(self) -> StorageStats:
        return await self._read(lambda store, threads: store.stats())

    def _open(self) -> Store:
        with storage_errors(self._path):
            budget_nbytes = self._budget_nbytes or default_budget(self._path)
            return Store(self._path, budget_nbytes, self._clock, self._options)

    async def _sync(self) -> None:
        await self._write(lambda store: store.sync())

    async def _read(self, call: Callable[[Store, Threads], T]) -> T:
        """Call the store in a reader thread."""
        readers = self._readers
        if readers is None:
            raise StorageUnavailable(f"{self._path}: not open")
        store = await self._live()
        self._num_reads += 1
        try:
            return await readers.run(self._guarded, lambda: call(store, readers))
        finally:
            self._num_reads -= 1

    async def _write(self, call: Callable[[Store], T]) -> T:
        """Call the store in the writer thread, unless its directory has gone."""
        writer = self._writer
        if writer is None:
            raise StorageUnavailable(f"{self._path}: not open")
        store = await self._live()

        def write() -> T:
            store.check_in_place()
            return call(store)

        return await writer.run(self._guarded, write)

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            with storage_errors(self._path):
                return call()
        except IndexLost as error:
            if not self._is_lost:
                logger.warning("%s; opening it anew", error)
            self._is_lost = True
            raise

    async def _live(self) -> Store:
        """Return the store; open it anew if it was lost and nobody reads the old one."""
        async with self._opening:
            if self._is_lost and self._num_reads == 0 and self._writer is not None:
                self._store = await self._writer.run(self._reopen)
                self._is_lost = False
            if self._store is None or self._is_lost:
                raise StorageUnavailable(f"{self._path}: the store is not open")
            return self._store

    def _reopen(self) -> Store:
        store, self._store = self._store, None
        if store is not None:
            store.close()
        return self._open()


def _listed(
    snapshot: Snapshot, positions: NDArray[np.intp], nbytes: int
) -> Callable[[Store, Threads], list[StoredRecord]]:
    return lambda store, threads: store.listed(snapshot, positions, nbytes, threads)
