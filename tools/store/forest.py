"""Which page follows which, of all pages of a store, in about 110 bytes a page.

Only keys and sizes are kept; the tokens of the few pages that somebody wants to see are read
again. Links are believed only between whole keys of 32 bytes and successive page numbers, so
there are no cycles, whatever headers say.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hicache.keys import KEY_NBYTES, NamespaceDigest, PageKey
from hicache.storage import StorageBackend, StoredRecord
from hicache.tools.store.reading import expected_nbytes
from hicache.tools.store.survey import headed

Rows = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)

ROOT, ORPHAN = -1, -2
"""In place of a parent: the page is the first of a prompt; its parent is not there."""
_BLOCK = 1 << 16


class Forest:
    """The pages of a store, or of some of its namespaces, as rows of a table."""

    def __init__(self) -> None:
        self.namespaces: list[NamespaceDigest] = []
        self.head_nbytes: list[int] = []
        """The longest header of each namespace: so much holds any page's tokens."""
        self._ids: dict[NamespaceDigest, int] = {}
        self._keys = bytearray()
        self._parents = bytearray()
        self._number = array("I")
        self._nbytes = array("Q")
        self._namespace = array("I")
        self._used = array("d")

    @classmethod
    async def read(
        cls,
        backend: StorageBackend,
        others: Counter[str],
        only: Iterable[NamespaceDigest] | None = None,
    ) -> "Forest":
        """Return the pages of a store; count what is none into ``others``."""
        wanted = None if only is None else set(only)
        forest = cls()
        async for record, header in headed(backend, others):
            if header is None or not header.is_page:
                continue
            if wanted is None or header.namespace in wanted:
                which = forest._id(header.namespace, header.header_nbytes)
                used = max(record.used or 0.0, header.created_us / 1e6)
                forest._add(record, header.parent, header.number, which, used)
        forest._link()
        return forest

    def __len__(self) -> int:
        return len(self.number)

    def key(self, row: int) -> PageKey:
        """Return a page's key."""
        return PageKey(bytes(self._keys[row * KEY_NBYTES : (row + 1) * KEY_NBYTES]))

    def keys(self, rows: Iterable[int]) -> list[PageKey]:
        """Return the keys of pages."""
        return [self.key(row) for row in rows]

    def records(self, rows: Iterable[int]) -> Iterator[StoredRecord]:
        """Yield pages as a backend lists them, to be read."""
        for row in rows:
            yield StoredRecord(self.key(row), b"", int(self.nbytes[row]))

    def children(self, row: int) -> Rows:
        """Return the pages after one. O(log pages)."""
        start, end = np.searchsorted(self._sorted_parents, [row, row + 1])
        found: Rows = self._by_parent[start:end]
        return found

    def roots(self, namespace: int) -> Rows:
        """Return the first pages of a namespace."""
        found: Rows = np.flatnonzero((self.parent == ROOT) & (self.namespace == namespace))
        return found

    def below(self, rows: Iterable[int]) -> Rows:
        """Return these pages and all after them, the deepest last. O(pages)."""
        is_in = np.zeros(len(self), bool)
        is_in[np.fromiter(rows, np.int64)] = True
        for level in self._levels():
            has_parent = level[self.parent[level] >= 0]
            is_in[has_parent] |= is_in[self.parent[has_parent]]
        found = np.flatnonzero(is_in)
        ordered: Rows = found[np.argsort(self.number[found], kind="stable")]
        return ordered

    def orphans(self) -> Rows:
        """Return the pages that no prompt leads to, the deepest last. O(pages)."""
        return self.below(np.flatnonzero(self.parent == ORPHAN).tolist())

    def totals(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each page the sum of a value over it and all after it. O(pages)."""
        sums = values.astype(np.int64)
        for level in reversed(list(self._levels())):
            has_parent = level[self.parent[level] >= 0]
            np.add.at(sums, self.parent[has_parent], sums[has_parent])
        return sums

    def latest(self) -> NDArray[np.float64]:
        """Return for each page when it or any after it was last used. O(pages)."""
        latest = self.used.copy()
        for level in reversed(list(self._levels())):
            has_parent = level[self.parent[level] >= 0]
            np.maximum.at(latest, self.parent[has_parent], latest[has_parent])
        return latest

    def parent_key(self, row: int) -> PageKey:
        """Return what a page says its parent is."""
        return PageKey(bytes(self._parents[row * KEY_NBYTES : (row + 1) * KEY_NBYTES]))

    # ------------------------------------------------------------ building

    def _id(self, namespace: NamespaceDigest, head_nbytes: int) -> int:
        which = self._ids.get(namespace)
        if which is None:
            which = self._ids[namespace] = len(self.namespaces)
            self.namespaces.append(namespace)
            self.head_nbytes.append(head_nbytes)
        self.head_nbytes[which] = max(self.head_nbytes[which], head_nbytes)
        return which

    def _add(
        self, record: StoredRecord, parent: bytes, number: int, which: int, used: float
    ) -> None:
        self._keys += record.key
        self._parents += parent
        self._number.append(number)
        self._nbytes.append(expected_nbytes(record))
        self._namespace.append(which)
        self._used.append(used)

    def _link(self) -> None:
        """Find every page's parent, and leave out pages that a scan has shown twice."""
        self._drop_repeated()
        self.number = _column(self._number, np.uint32)
        self.nbytes = _column(self._nbytes, np.uint64)
        self.namespace = _column(self._namespace, np.uint32)
        self.used = _column(self._used, np.float64)
        prefixes, order = self._sorted()
        keys, parents = _rows(self._keys), _rows(self._parents)
        digests = _rows(bytearray(b"".join(self.namespaces)))
        self.parent: Rows = np.full(len(keys), ORPHAN, np.int64)
        for start in range(0, len(keys), _BLOCK):
            block = slice(start, start + _BLOCK)
            wanted = _prefixes(parents[block])
            at = np.minimum(np.searchsorted(prefixes, wanted), len(order) - 1)
            candidate = order[at]
            is_parent = (
                (keys[candidate] == parents[block]).all(axis=1)
                & (self.number[candidate] + 1 == self.number[block])
                & (self.namespace[candidate] == self.namespace[block])
            )
            is_first = (self.number[block] == 0) & (
                digests[self.namespace[block]] == parents[block]
            ).all(axis=1)
            self.parent[block] = np.where(is_first, ROOT, np.where(is_parent, candidate, ORPHAN))
        self._by_parent: Rows = np.argsort(self.parent, kind="stable")
        self._sorted_parents = self.parent[self._by_parent]
        self._by_number: Rows = np.argsort(self.number, kind="stable")

    def _drop_repeated(self) -> None:
        prefixes, order = self._sorted()
        same = np.flatnonzero(prefixes[1:] == prefixes[:-1]) + 1
        repeated = {int(max(order[at], order[at - 1])) for at in same}
        for row in sorted(repeated, reverse=True):
            del self._keys[row * KEY_NBYTES : (row + 1) * KEY_NBYTES]
            del self._parents[row * KEY_NBYTES : (row + 1) * KEY_NBYTES]
            for column in (self._number, self._nbytes, self._namespace, self._used):
                del column[row]

    def _sorted(self) -> tuple[NDArray[np.uint64], Rows]:
        """Return the first 8 bytes of all keys, sorted, and which row each is of."""
        prefixes = _prefixes(_rows(self._keys))
        order: Rows = np.argsort(prefixes, kind="stable")
        return prefixes[order], order

    def _levels(self) -> Iterator[Rows]:
        """Yield the pages of each number, from the first on."""
        numbers = self.number[self._by_number]
        ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        start = 0
        for end in ends:
            yield self._by_number[start:end]
            start = end


def _column(values: "array[int] | array[float]", dtype: type[Number]) -> NDArray[Number]:
    return np.frombuffer(values, dtype) if len(values) else np.zeros(0, dtype)


def _rows(packed: bytearray) -> NDArray[np.uint8]:
    flat = np.frombuffer(packed, np.uint8) if packed else np.zeros(0, np.uint8)
    return flat.reshape(-1, KEY_NBYTES)


def _prefixes(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(rows[:, :8]).view(np.uint64).reshape(-1)
