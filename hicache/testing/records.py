"""Records, keys and buffers for tests of backends: the same for the same name, each time."""

import ctypes
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from typing_extensions import Buffer

from hicache.keys import PageKey
from hicache.storage import StorageBackend

Reopen = Callable[[], Awaitable[StorageBackend]]

_FILL = 0xA5


def key(name: object) -> PageKey:
    """Return the key that stands for a name."""
    return PageKey(hashlib.sha256(repr(name).encode()).digest())


def record(name: object, nbytes: int = 100) -> bytes:
    """Return bytes that are different for each name, and the same each time."""
    return Random(repr(name)).randbytes(nbytes)


def aligned(nbytes: int, alignment: int) -> memoryview:
    """Return a buffer filled with a marker, at an address that is a multiple of ``alignment``."""
    spare = bytearray([_FILL]) * (nbytes + alignment)
    address = ctypes.addressof(ctypes.c_char.from_buffer(spare))
    start = -address % alignment
    return memoryview(spare)[start : start + nbytes]


async def read(backend: StorageBackend, name: object, nbytes: int = 100) -> bytes | None:
    """Return a record of at most ``nbytes`` bytes; ``None`` where it is absent."""
    return await Subject(backend).read(name, nbytes)


async def put(backend: StorageBackend, *names: object, nbytes: int = 100) -> list[bool]:
    """Store a record for each name."""
    return await Subject(backend).put(*names, nbytes=nbytes)


def is_zero(buffer: memoryview) -> bool:
    """Whether there is nothing but zeros in a buffer."""
    return buffer.tobytes().count(0) == len(buffer)


class Subject:
    """A backend under test, with records and buffers of the sizes that it accepts.

    Every size is rounded up to the backend's alignment, in records and buffers alike.
    """

    def __init__(self, backend: StorageBackend, reopen: Reopen | None = None) -> None:
        self.backend = backend
        self._reopen = reopen

    def nbytes(self, nbytes: int) -> int:
        """Return the size that stands for this one."""
        return -(-nbytes // self.backend.alignment) * self.backend.alignment

    def record(self, name: object, nbytes: int = 100) -> bytes:
        """Return the record of a name."""
        return record(name, self.nbytes(nbytes))

    def buffer(self, nbytes: int = 100) -> memoryview:
        """Return a buffer to read into, filled with a marker."""
        return aligned(self.nbytes(nbytes), self.backend.alignment)

    def source(self, name: object, nbytes: int = 100) -> memoryview:
        """Return a record in a buffer to write from."""
        buffer = self.buffer(nbytes)
        buffer[:] = self.record(name, nbytes)
        return buffer

    async def put(self, *names: object, nbytes: int = 100) -> list[bool]:
        """Store a record for each name, in one batch."""
        items: list[tuple[PageKey, Sequence[Buffer]]] = [
            (key(name), [self.source(name, nbytes)]) for name in names
        ]
        return await self.backend.put(items)

    async def get(self, *names: object, nbytes: int = 100) -> list[bytes | None]:
        """Return the records of these names, in one batch; ``None`` where they are absent."""
        buffers = [self.buffer(nbytes) for _ in names]
        lengths = await self.backend.get([key(name) for name in names], [[one] for one in buffers])
        return [
            None if length is None else bytes(buffer[:length])
            for length, buffer in zip(lengths, buffers, strict=True)
        ]

    async def read(self, name: object, nbytes: int = 100) -> bytes | None:
        """Return one record."""
        (found,) = await self.get(name, nbytes=nbytes)
        return found

    async def contains(self, *names: object) -> list[bool]:
        """Return which of these are there."""
        return await self.backend.contains([key(name) for name in names])

    async def delete(self, *names: object) -> None:
        """Remove these."""
        await self.backend.delete([key(name) for name in names])

    async def scan(self, header_nbytes: int) -> list[tuple[PageKey, bytes]]:
        """Return all that a scan yields."""
        return [(name, bytes(header)) async for name, header in self.backend.scan(header_nbytes)]

    async def reopen(self) -> None:
        """Close the backend, and go on with another on the same store."""
        assert self._reopen is not None, "this subject was made without a way to open it anew"
        await self.backend.close()
        self.backend = await self._reopen()
