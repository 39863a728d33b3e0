"""The default backend: the contract, and what it promises beyond it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hicache.backends.lmdb import LmdbBackend
from hicache.storage import StorageBackend
from hicache.testing import BackendTests
from hicache.testing.conformance import Reopen

MIB = 1024 * 1024


class TestLmdbBackend(BackendTests):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[StorageBackend]:
        async with LmdbBackend(tmp_path / "store", 256 * MIB) as backend:
            yield backend

    @pytest.fixture
    async def reopen(self, backend: StorageBackend, tmp_path: Path) -> AsyncIterator[Reopen]:
        opened: list[LmdbBackend] = []

        async def close_and_open() -> StorageBackend:
            await backend.close()
            opened.append(LmdbBackend(tmp_path / "store", 256 * MIB))
            await opened[-1].open([])
            return opened[-1]

        yield close_and_open
        for one in opened:
            await one.close()

    @pytest.fixture
    async def bounded(self, tmp_path: Path) -> AsyncIterator[StorageBackend]:
        async with LmdbBackend(tmp_path / "bounded", 8 * MIB) as backend:
            yield backend
