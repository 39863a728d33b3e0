"""Storage in virtual time: which records there are, and which leave when it is full."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from hicache.keys import PageKey, PageRef


class VirtualStore:
    """Keys of records, the one used longest ago first; of a chain, its tail first."""

    def __init__(self, capacity: float) -> None:
        """``capacity``: records that it may have; infinite where nothing ever leaves."""
        self._capacity = capacity
        self._keys: OrderedDict[PageKey, None] = OrderedDict()
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._keys)

    def has(self, keys: Iterable[PageKey]) -> list[bool]:
        """Say which records are there."""
        return [key in self._keys for key in keys]

    def read(self, pages: Sequence[PageRef]) -> list[bool]:
        """Say which pages could be read, and count that as a use."""
        found = self.has(page.key for page in pages)
        self.touch([page.key for page, is_there in zip(pages, found, strict=True) if is_there])
        return found

    def write(self, pages: Sequence[PageRef]) -> None:
        """Add records; the oldest leave if there are too many."""
        for page in reversed(pages):
            self._keys[page.key] = None
            self._keys.move_to_end(page.key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
            self.num_evicted += 1

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Count records as used. O(1) where nothing ever leaves."""
        if self._capacity == math.inf:
            return
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    def delete(self, keys: Iterable[PageKey]) -> None:
        """Remove records."""
        for key in keys:
            self._keys.pop(key, None)
