# sqlite_backend.py
"""Records in one SQLite file. One thread does the work, one hop a batch."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from typing_extensions import Buffer

from hicache.errors import ConfigError, StorageError, StorageFull, StorageUnavailable
from hicache.keys import PageKey
from hicache.storage import BackendOptions, StorageBackend, StorageStats

TABLE = "CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, used REAL, record BLOB)"
COUNT = "SELECT count(*), ifnull(sum(length(record)), 0) FROM records"
HEADERS = "SELECT key, ifnull(substr(record, 1, ?), x'') FROM records"
OLDEST = "DELETE FROM records WHERE key IN (SELECT key FROM records ORDER BY used LIMIT ?)"


class SqliteOptions(BackendOptions):
    synchronous: Literal["OFF", "NORMAL", "FULL"] = "OFF"
    """How hard SQLite tries to outlive a power cut. A record that is lost is only a miss."""


class SqliteBackend(StorageBackend):
    evicts_itself: ClassVar[bool] = True
    max_batch: ClassVar[int] = 32
    options_type: ClassVar[type[BackendOptions]] = SqliteOptions

    def __init__(self, path: Path, budget: int | None = None, synchronous: str = "OFF") -> None:
        self._path, self._budget, self._synchronous = path / "sqlite", budget, synchronous
        self._thread = ThreadPoolExecutor(1, "hicache-sqlite")
        self._num_evicted = 0

    @classmethod
    def create(
        cls, options: BackendOptions, *, path: Path | None, budget_nbytes: int | None
    ) -> Self:
        assert isinstance(options, SqliteOptions)
        if path is None:
            raise ConfigError("sqlite needs cache.storage.path")
        return cls(path, budget_nbytes, options.synchronous)

    async def open(self, pool: Sequence[memoryview]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._path, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"{self._path}: {error}") from None
        await self._do(f"PRAGMA synchronous = {self._synchronous}")
        await self._do(TABLE)

    async def close(self) -> None:
        self._thread.shutdown()
        self._db.close()

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        found = await self._do("SELECT record FROM records WHERE key = ?", [(key,) for key in keys])
        pairs = zip(found, into, strict=True)
        return [scatter(rows[0][0], buffers) if rows else None for rows, buffers in pairs]

    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        rows = [(key, time.time(), b"".join(parts)) for key, parts in items]
        await self._do("INSERT OR IGNORE INTO records VALUES (?, ?, ?)", rows)
        while self._budget and (await self.stats()).nbytes > self._budget:
            await self._do(OLDEST, [(len(items),)])
            self._num_evicted += len(items)
        return [True] * len(items)

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        found = await self._do("SELECT 1 FROM records WHERE key = ?", [(key,) for key in keys])
        return [bool(rows) for rows in found]

    async def delete(self, keys: Sequence[PageKey]) -> None:
        await self._do("DELETE FROM records WHERE key = ?", [(key,) for key in keys])

    async def touch(self, keys: Sequence[PageKey]) -> None:
        rows = [(time.time(), key) for key in keys]
        await self._do("UPDATE records SET used = ? WHERE key = ?", rows)

    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        [rows] = await self._do(HEADERS, [(header_nbytes,)])
        for key, header in rows:
            yield PageKey(key), header

    async def stats(self) -> StorageStats:
        [[(num_records, nbytes)]] = await self._do(COUNT)
        return StorageStats(num_records, nbytes, self._budget, self._num_evicted)

    async def _do(self, statement: str, rows: Sequence[tuple[Any, ...]] = ((),)) -> list[list[Any]]:
        """Return what each run of a statement gives; all of them in one hop and transaction."""

        def work() -> list[list[Any]]:
            with self._db:
                return [self._db.execute(statement, row).fetchall() for row in rows]

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.OperationalError as error:
            is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            raise (StorageFull if is_full else StorageUnavailable)(f"sqlite: {error}") from error
        except sqlite3.Error as error:
            raise StorageError(f"sqlite: {error}") from error


def scatter(record: bytes, buffers: Sequence[memoryview]) -> int:
    """Fill the buffers, in order, with a record; return its length."""
    rest = memoryview(record)
    for buffer in buffers:
        part = rest[: len(buffer)]
        buffer[: len(part)] = part
        rest = rest[len(part) :]
    return len(record)
