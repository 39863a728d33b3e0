"""Slots of a pool that has no memory: any will do, so none need lie beside another."""

from array import array
from collections.abc import Sequence


class PlainSlots:
    """A stack of free slots. Costs a copy of the slots asked for, and nothing else."""

    def __init__(self, num_slots: int) -> None:
        self._free = array("i", range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def allocate(self, count: int) -> "array[int] | None":
        """Return the ``count`` slots that were freed last, or ``None`` where fewer are free."""
        first = len(self._free) - count
        if first < 0:
            return None
        slots = self._free[first:]
        del self._free[first:]
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Put slots back."""
        self._free.extend(slots)

    def check(self) -> None:
        """Assert that no slot is free twice."""
        assert len(set(self._free)) == len(self._free)
