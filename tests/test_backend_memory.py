"""The backend that keeps records in memory, alone and inside one that could fail but does not."""

from collections.abc import AsyncIterator

import pytest

from hicache.backends.memory import MemoryBackend
from hicache.keys import PageKey
from hicache.storage import BackendOptions, StorageBackend, StorageStats
from hicache.testing import BackendTests, FaultyBackend
from hicache.testing.conformance import Reopen, key, put, read, record

BUDGET_NBYTES = 8 * 1024 * 1024


class TestMemoryBackend(BackendTests):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[StorageBackend]:
        async with MemoryBackend() as backend:
            yield backend

    @pytest.fixture
    async def bounded(self) -> AsyncIterator[StorageBackend]:
        async with MemoryBackend(BUDGET_NBYTES) as backend:
            yield backend

    @pytest.fixture
    async def reopen(self, backend: StorageBackend) -> Reopen:
        async def close_and_open() -> StorageBackend:
            await backend.close()
            await backend.open([])
            return backend

        return close_and_open


class TestFaultyBackendWithoutFaults(TestMemoryBackend):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[StorageBackend]:
        async with FaultyBackend(MemoryBackend()) as backend:
            yield backend

    @pytest.fixture
    async def bounded(self) -> AsyncIterator[StorageBackend]:
        async with FaultyBackend(MemoryBackend(BUDGET_NBYTES)) as backend:
            yield backend


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_the_least_recently_used_record_is_evicted() -> None:
    backend = MemoryBackend.create(BackendOptions(), path=None, budget_nbytes=300)
    await put(backend, "a", "b", "c")
    await backend.touch([key("a"), key("never put")])

    await put(backend, "d")

    assert await backend.contains([key(name) for name in "abcd"]) == [True, False, True, True]
    assert await backend.stats() == StorageStats(3, 300, 300, num_evicted=1)


@pytest.mark.anyio
async def test_a_record_beyond_the_whole_budget_is_not_accepted() -> None:
    backend = MemoryBackend(budget_nbytes=300)
    await put(backend, "a")

    accepted = await backend.put([(PageKey(bytes(32)), [bytes(301)])])

    assert accepted == [False]
    assert await read(backend, "a") == record("a")
