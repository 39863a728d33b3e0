"""Buffers of one kind for a batch, used again and again."""

import mmap

from hicache.errors import StorageError


class Scratch:
    """Sets of ``num_buffers`` buffers of ``nbytes`` each, made when they are first needed.

    Each buffer starts at a multiple of its length after a page boundary, so it is as aligned as
    the length is. Whoever takes a set gives it back when the backend's call has returned, and not
    before. Belongs to the storage loop.
    """

    def __init__(self, num_buffers: int, nbytes: int, max_sets: int | None = None) -> None:
        """``max_sets``: how many there may be; by default as many as there are calls."""
        self.num_buffers = num_buffers
        self._nbytes = nbytes
        self._num_left = max_sets
        self._free: list[list[memoryview]] = []

    def take(self) -> list[memoryview]:
        """Return a set; raise ``StorageError`` where all are lent to calls that hang."""
        if self._free:
            return self._free.pop()
        if self._num_left is not None:
            if not self._num_left:
                raise StorageError("calls that have not returned hold all scratch memory")
            self._num_left -= 1
        arena = memoryview(mmap.mmap(-1, self.num_buffers * self._nbytes))
        return [arena[start : start + self._nbytes] for start in range(0, len(arena), self._nbytes)]

    def give(self, buffers: list[memoryview]) -> None:
        """Take a set back."""
        self._free.append(buffers)
