"""Backends that a server is started with, by their import path, to see what it makes of them."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

from typing_extensions import Buffer

from hicache.backends.memory import MemoryBackend
from hicache.errors import StorageFull
from hicache.keys import PageKey
from hicache.storage import StorageStats


class RaisingBackend(MemoryBackend):
    """Raises on every call."""

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        await self._fail()

    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        await self._fail()

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        await self._fail()

    async def delete(self, keys: Sequence[PageKey]) -> None:
        await self._fail()

    async def touch(self, keys: Sequence[PageKey]) -> None:
        await self._fail()

    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        for key in await self._keys():
            yield key, b""

    async def stats(self) -> StorageStats:
        await self._fail()

    async def _keys(self) -> list[PageKey]:
        await self._fail()

    async def _fail(self) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class HangingBackend(RaisingBackend):
    """Never comes back from a call."""

    async def _fail(self) -> NoReturn:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("a future was done that nobody knows")


class BlockingBackend(MemoryBackend):
    """Does not come back from reading and writing, and meanwhile nothing else runs on its loop."""

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        _block()

    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        _block()

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        _block()


class FullBackend(MemoryBackend):
    """Has no room for anything."""

    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        raise StorageFull("no room")


class UnopenableBackend(MemoryBackend):
    """Cannot be opened."""

    async def open(self, pool: Sequence[memoryview]) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _block() -> NoReturn:
    threading.Event().wait()
    raise AssertionError("an event was set that nobody knows")
