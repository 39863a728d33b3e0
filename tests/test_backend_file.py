"""One file a page: the contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hicache.backends.file import FileBackend
from hicache.storage import StorageBackend
from hicache.testing import BackendTests
from hicache.testing.conformance import Reopen

MIB = 1024 * 1024


class TestFileBackend(BackendTests):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[StorageBackend]:
        async with FileBackend(tmp_path / "store", 256 * MIB) as backend:
            yield backend

    @pytest.fixture
    async def reopen(self, backend: StorageBackend, tmp_path: Path) -> AsyncIterator[Reopen]:
        opened: list[FileBackend] = []

        async def close_and_open() -> StorageBackend:
            await backend.close()
            opened.append(FileBackend(tmp_path / "store", 256 * MIB))
            await opened[-1].open([])
            return opened[-1]

        yield close_and_open
        for one in opened:
            await one.close()

    @pytest.fixture
    async def bounded(self, tmp_path: Path) -> AsyncIterator[StorageBackend]:
        async with FileBackend(tmp_path / "bounded", 8 * MIB) as backend:
            yield backend
