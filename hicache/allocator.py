"""Free slots of a pool, kept as runs, so that pages that arrive together lie together.

Copies of neighbouring pages between neighbouring slots are merged into one, hence runs. Plain
bookkeeping: no memory, no tensor.

Invariants, asserted by ``check``:
  1. The runs are exactly the slots marked free, and ``num_free`` of them.
  2. No two runs touch: neighbours are merged as soon as both are free.
  3. A run is in the bucket of its length, and a bucket is marked when it has a run.
"""

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from hicache.errors import ConfigError


class Slots(Protocol):
    """Hands out the slots of a pool, each to one owner at a time."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Slots that nobody has."""

    @abstractmethod
    def allocate(self, count: int) -> "array[int] | None":
        """Return ``count`` slots, which the caller owns; ``None`` where fewer are free."""

    @abstractmethod
    def free(self, slots: Sequence[int]) -> None:
        """Take slots back, in any order."""

    @abstractmethod
    def check(self) -> None:
        """Assert that no slot is free twice."""


class SlotAllocator:
    """Hands out slots ``0 .. num_slots - 1``, each to one owner at a time.

    Costs O(slots handled), whatever is free. What is returned belongs to the caller and shares
    no memory with the allocator.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ConfigError(f"a pool cannot have {num_slots} slots")
        self.num_slots = num_slots
        self.num_free = 0
        self._is_free = bytearray(num_slots)
        self._end_of: dict[int, int] = {}  # first slot of each run: the slot behind its last
        self._start_of: dict[int, int] = {}  # the other way round
        # Runs by the bit length of their length, so that one of a fitting size is found at once.
        self._buckets: list[dict[int, None]] = [{} for _ in range(num_slots.bit_length() + 1)]
        self._filled = 0  # bit b: bucket b has a run
        if num_slots:
            self._free_run(0, num_slots)

    def allocate(self, count: int) -> "array[int] | None":
        """Return ``count`` slots, or ``None`` and take nothing where fewer are free.

        They come in ascending runs, in one if a run of that length is found at once.
        """
        assert count >= 0
        if count > self.num_free:
            return None
        slots = array("i")
        while (missing := count - len(slots)) > 0:
            start, end = self._take_run(missing)
            taken = min(missing, end - start)
            slots.extend(range(start, start + taken))
            if start + taken < end:
                self._add(start + taken, end)
            self._is_free[start : start + taken] = bytes(taken)
        self.num_free -= count
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Take slots back, in any order. To free what is free is an ``AssertionError``."""
        for start, end in _ascending(slots):
            assert 0 <= start < end <= self.num_slots, f"no such slots: {start} to {end - 1}"
            assert 1 not in self._is_free[start:end], f"freed twice, in {start} to {end - 1}"
            self._free_run(start, end)

    def check(self) -> None:
        """Assert all that the module says. O(slots)."""
        marked = bytearray(self.num_slots)
        for start, end in self._end_of.items():
            assert 0 <= start < end <= self.num_slots
            assert 1 not in marked[start:end], "runs overlap"
            assert end not in self._end_of, "neighbouring runs are not merged"
            assert self._start_of[end] == start
            assert start in self._buckets[(end - start).bit_length()]
            marked[start:end] = b"\1" * (end - start)
        assert marked == self._is_free
        assert marked.count(1) == self.num_free
        assert len(self._end_of) == len(self._start_of) == sum(map(len, self._buckets))
        assert [bool(self._filled >> b & 1) for b in range(len(self._buckets))] == [
            bool(bucket) for bucket in self._buckets
        ]

    def _take_run(self, count: int) -> tuple[int, int]:
        """Remove and return the last freed run of the best size: just enough, else the longest."""
        wanted = count.bit_length()
        if bucket := self._buckets[wanted]:
            start = _last(bucket)
            if self._end_of[start] - start >= count:
                return self._remove(start, self._end_of[start])
        if longer := self._filled >> (wanted + 1):
            wanted += (longer & -longer).bit_length()  # the shortest of those that surely fit
        else:
            wanted = self._filled.bit_length() - 1
        start = _last(self._buckets[wanted])
        return self._remove(start, self._end_of[start])

    def _free_run(self, start: int, end: int) -> None:
        self._is_free[start:end] = b"\1" * (end - start)
        self.num_free += end - start
        if (before := self._start_of.get(start)) is not None:
            self._remove(before, start)
            start = before
        if (after := self._end_of.get(end)) is not None:
            self._remove(end, after)
            end = after
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        size = (end - start).bit_length()
        self._buckets[size][start] = None
        self._filled |= 1 << size

    def _remove(self, start: int, end: int) -> tuple[int, int]:
        del self._end_of[start], self._start_of[end]
        size = (end - start).bit_length()
        bucket = self._buckets[size]
        del bucket[start]
        if not bucket:
            self._filled &= ~(1 << size)
        return start, end


def _last(bucket: dict[int, None]) -> int:
    """Return the key that was put in last. A dict walks over what was deleted to find it;
    ``popitem`` forgets those, so that none is walked over twice."""
    last, _ = bucket.popitem()
    bucket[last] = None
    return last


def _ascending(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield maximal stretches of consecutive slots as first and behind last."""
    if not slots:
        return
    start = end = slots[0]
    for slot in slots:
        if slot != end:
            yield start, end
            start = slot
        end = slot + 1
    yield start, end
