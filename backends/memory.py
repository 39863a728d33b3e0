"""Records in a dictionary: for tests, and as the shortest example of a backend."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar, Self

from typing_extensions import Buffer

from hicache.keys import PageKey
from hicache.storage import BackendOptions, StorageBackend, StorageStats


class MemoryBackend(StorageBackend):
    """Keeps records in this process, and forgets them with it.

    Nothing ever waits, so a call is over before another begins. Beyond its budget the records
    unused for longest go first. Closing it keeps them, so that a test can open it again.
    """

    outlives_process: ClassVar[bool] = False
    evicts_itself: ClassVar[bool] = True

    def __init__(self, budget_nbytes: int | None = None) -> None:
        self._records: dict[PageKey, bytes] = {}
        """By use, the oldest first."""
        self._budget_nbytes = budget_nbytes
        self._nbytes = 0
        self._num_evicted = 0

    @classmethod
    def create(
        cls, options: BackendOptions, *, path: Path | None, budget_nbytes: int | None
    ) -> Self:
        return cls(budget_nbytes)

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        lengths: list[int | None] = []
        for key, buffers in zip(keys, into, strict=True):
            record = self._records.get(key)
            lengths.append(None if record is None else len(record))
            rest = memoryview(record or b"")
            for buffer in buffers:
                part = rest[: len(buffer)]
                buffer[: len(part)] = part
                rest = rest[len(part) :]
        return lengths

    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        return [self._put(key, b"".join(buffers)) for key, buffers in items]

    def _put(self, key: PageKey, record: bytes) -> bool:
        if key in self._records:
            return True
        if self._budget_nbytes is not None and len(record) > self._budget_nbytes:
            return False
        self._records[key] = record
        self._nbytes += len(record)
        while self._budget_nbytes is not None and self._nbytes > self._budget_nbytes:
            oldest = next(iter(self._records))
            self._nbytes -= len(self._records.pop(oldest))
            self._num_evicted += 1
        return True

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [key in self._records for key in keys]

    async def delete(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self._nbytes -= len(self._records.pop(key, b""))

    async def touch(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            if (record := self._records.pop(key, None)) is not None:
                self._records[key] = record

    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        for key, record in list(self._records.items()):
            yield key, record[:header_nbytes]

    async def stats(self) -> StorageStats:
        return StorageStats(
            len(self._records), self._nbytes, self._budget_nbytes, self._num_evicted
        )
