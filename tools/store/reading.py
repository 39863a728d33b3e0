"""Reads records whole: in batches, several in flight, in bounded memory; each one is proved.

At most 5 batches of 128 records and 32 MiB are in memory (a larger record is a batch of its own).
"""

import asyncio
import mmap
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache.codec import Header, Keyring, peek, prove
from hicache.errors import CorruptPage, StorageError
from hicache.keys import PageKey
from hicache.storage import StorageBackend, StoredRecord
from hicache.tools.store.sealed import open_seals

T = TypeVar("T")

BATCH_RECORDS = 128
BATCH_NBYTES = 32 << 20
IN_FLIGHT = 4
_GUESSED_NBYTES = 64 << 10
"""Room for a record of which neither backend nor header says how long it is."""
_MOST_GUESSED_NBYTES = 64 << 20
UNREADABLE = "frame: damaged, or its end is missing"


@dataclass(slots=True)
class Found:
    """A record that was read: good, bad, or gone meanwhile."""

    record: StoredRecord
    nbytes: int = 0
    header: Header | None = None
    """What it proved to be; ``None`` if it is not good."""
    data: memoryview | None = None
    """Its bytes, until the next batch is asked for."""
    problem: str | None = None
    """What is wrong with it; ``None`` if it is good, or is gone."""
    is_opened: bool = False
    """Whether it is sealed, and its seals were opened."""


class Reader:
    """Reads records of one backend."""

    def __init__(self, backend: StorageBackend, keyring: Keyring | None = None) -> None:
        """With ``keyring`` the seals of what it fits are opened, too."""
        self._backend = backend
        self._keyring = keyring
        self._max_batch = min(BATCH_RECORDS, backend.max_batch)
        self._arenas: list[mmap.mmap] = []

    async def read(self, records: AsyncIterator[StoredRecord]) -> AsyncIterator[list[Found]]:
        """Yield what was read, in the order given; what it holds is valid until the next."""
        reading: deque[asyncio.Task[tuple[list[Found], mmap.mmap]]] = deque()
        try:
            async for batch in grouped(records, self._max_batch):
                reading.append(asyncio.create_task(self._read(batch)))
                if len(reading) > IN_FLIGHT:
                    found, arena = await reading.popleft()
                    yield found
                    self._arenas.append(arena)
            while reading:
                found, arena = await reading.popleft()
                yield found
                self._arenas.append(arena)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _read(self, batch: Sequence[StoredRecord]) -> tuple[list[Found], mmap.mmap]:
        found = [Found(record) for record in batch]
        arena = self._arena(sum(self._room(one.record) for one in found))
        view, start, wanted = memoryview(arena), 0, list[Found]()
        for one in found:
            if one.record.head is None:
                one.problem = UNREADABLE  # reading it would make the backend drop it
                continue
            end = start + self._room(one.record)
            one.data, start = view[start:end], end
            wanted.append(one)
        await self._get(wanted)
        await asyncio.to_thread(_prove, found, self._keyring)
        doubtful = [one for one in found if one.problem is not None and one.data is not None]
        if doubtful:  # read twice what is called bad
            again = [Found(one.record, data=_buffer(one.nbytes)) for one in doubtful]
            await self._get(again)
            _prove(again, self._keyring)
            for one, second in zip(doubtful, again, strict=True):
                if second.header is not None:
                    one.header, one.problem, one.data = second.header, None, second.data
        return found, arena

    async def _get(self, wanted: Sequence[Found]) -> None:
        """Fill in bytes and lengths. A record that is absent has no data afterwards."""
        try:
            await self._get_all(wanted)
        except StorageError:  # one may fail the batch: see which
            for one in wanted:
                try:
                    await self._get_all([one])
                except StorageError as error:
                    one.problem, one.data = f"cannot be read: {error}", None
        for one in wanted:
            if one.data is not None and one.nbytes > len(one.data):
                one.data = _buffer(one.nbytes)  # it is longer than was known
                await self._get_all([one])
            if one.data is not None:
                one.data = one.data[: one.nbytes]

    async def _get_all(self, wanted: Sequence[Found]) -> None:
        if not wanted:
            return
        into: list[list[memoryview]] = [[one.data] for one in wanted if one.data is not None]
        lengths = await self._backend.get([one.record.key for one in wanted], into)
        for one, length in zip(wanted, lengths, strict=True):
            if length is None:
                one.data = None
            else:
                one.nbytes = length

    def _room(self, record: StoredRecord) -> int:
        unit = self._backend.alignment
        return -(-max(expected_nbytes(record), 1) // unit) * unit

    def _arena(self, nbytes: int) -> mmap.mmap:
        for at, arena in enumerate(self._arenas):
            if len(arena) >= nbytes:
                return self._arenas.pop(at)
        if self._arenas:
            self._arenas.pop()
        return mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))


def expected_nbytes(record: StoredRecord) -> int:
    """Return how long a record should be, from its backend or its own header."""
    if record.nbytes is not None:
        return record.nbytes
    try:
        header = peek(record.head or b"")
    except CorruptPage:
        return _GUESSED_NBYTES
    return min(header.header_nbytes + header.stored_nbytes, _MOST_GUESSED_NBYTES)


async def grouped(
    records: AsyncIterator[StoredRecord], max_records: int
) -> AsyncIterator[list[StoredRecord]]:
    """Yield batches of at most so many records, and of 32 MiB or one record."""
    batch: list[StoredRecord] = []
    nbytes = 0
    async for record in records:
        size = expected_nbytes(record)
        if batch and (len(batch) == max_records or nbytes + size > BATCH_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(record)
        nbytes += size
    if batch:
        yield batch


async def stream(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield items one by one, as if they had to be waited for."""
    for item in items:
        yield item


async def delete(backend: StorageBackend, keys: Sequence[PageKey]) -> None:
    """Delete records, a batch at a time."""
    step = min(BATCH_RECORDS, backend.max_batch)
    for start in range(0, len(keys), step):
        await backend.delete(keys[start : start + step])


async def heads(
    backend: StorageBackend, keys: Sequence[PageKey], nbytes: int
) -> list[bytes | None]:
    """Return the first ``nbytes`` bytes of records; ``None`` for those that are gone."""
    found: list[bytes | None] = []
    step = min(BATCH_RECORDS, backend.max_batch)
    size = -(-nbytes // backend.alignment) * backend.alignment
    for start in range(0, len(keys), step):
        some = keys[start : start + step]
        buffers = [_buffer(size) for _ in some]
        lengths = await backend.get(some, [[buffer] for buffer in buffers])
        found += [
            None if length is None else bytes(buffer[: min(length, nbytes)])
            for length, buffer in zip(lengths, buffers, strict=True)
        ]
    return found


def _prove(found: Sequence[Found], keyring: Keyring | None) -> None:
    for one in found:
        if one.data is None:
            continue
        try:
            header = prove(one.record.key, one.data)
            one.is_opened = open_seals(header, one.data, keyring)
        except CorruptPage as error:
            one.problem = str(error)
        else:
            one.header = header


def _buffer(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE)))
