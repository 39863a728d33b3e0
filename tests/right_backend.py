"""A backend that keeps every promise, for wrong ones to break one each."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar, Self

from typing_extensions import Buffer

from hicache.keys import PageKey
from hicache.storage import BackendOptions, StorageBackend, StorageStats

Buffers = Sequence[Sequence[memoryview]]
Items = Sequence[tuple[PageKey, Sequence[Buffer]]]

CAUGHT_BY: dict[str, str] = {}
"""By the name of each wrong backend: the check that must fail."""


class Right(StorageBackend):
    """Keeps records by path, for as long as the process lives: what every wrong one begins as."""

    evicts_itself: ClassVar[bool] = True
    stores: ClassVar[dict[Path, dict[PageKey, bytes]]] = {}

    def __init__(self, path: Path, budget_nbytes: int) -> None:
        self.path = path
        self.budget_nbytes = budget_nbytes
        self.num_evicted = 0
        self.held: dict[PageKey, bytes] = {}

    @classmethod
    def create(
        cls, options: BackendOptions, *, path: Path | None, budget_nbytes: int | None
    ) -> Self:
        assert path is not None
        assert budget_nbytes is not None
        return cls(path, budget_nbytes)

    async def open(self, pool: Sequence[memoryview]) -> None:
        self.held = self.stores.setdefault(self.path, {})

    async def get(self, keys: Sequence[PageKey], into: Buffers) -> list[int | None]:
        await asyncio.sleep(0)
        return [self.read(key, buffers) for key, buffers in zip(keys, into, strict=True)]

    def read(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        record = self.held.get(key)
        if record is None:
            return None
        rest = memoryview(record)
        for buffer in buffers:
            part = rest[: len(buffer)]
            buffer[: len(part)] = part
            rest = rest[len(part) :]
        return len(record)

    async def put(self, items: Items) -> list[bool]:
        joined = [(key, b"".join(parts)) for key, parts in items]
        await asyncio.sleep(0)
        self.held.update(joined)
        self.evict()
        return [True] * len(items)

    def evict(self) -> None:
        while sum(map(len, self.held.values())) > self.budget_nbytes:
            del self.held[next(iter(self.held))]
            self.num_evicted += 1

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [key in self.held for key in keys]

    async def delete(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.held.pop(key, None)

    async def touch(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            if key in self.held:
                self.held[key] = self.held.pop(key)

    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        for key, record in list(self.held.items()):
            yield key, record[:header_nbytes]

    async def stats(self) -> StorageStats:
        nbytes = sum(map(len, self.held.values()))
        return StorageStats(len(self.held), nbytes, self.budget_nbytes, self.num_evicted)


WRONG: list[type[Right]] = []


def caught_by(check: str):  # type: ignore[no-untyped-def]
    """Declare a wrong backend, and the check that must notice."""

    def declare(kind: type[Right]) -> type[Right]:
        CAUGHT_BY[kind.__name__] = check
        WRONG.append(kind)
        return kind

    return declare
