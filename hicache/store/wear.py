"""How many bytes were written to storage in the last day, against what a day may have. Pure.

A sliding day in slots of a quarter of an hour: a byte that was written counts for 24 hours, to the
quarter. Times are seconds of one clock that never goes back.
"""

from collections import deque
from collections.abc import Sequence

DAY_S = 86_400.0
SLOT_S = 900.0


class Wear:
    """What one process writes, and what it finds that was written before it."""

    def __init__(self, limit_nbytes: int | None) -> None:
        """``limit_nbytes``: of any 24 hours; ``None`` counts only."""
        self.limit_nbytes = limit_nbytes
        self._slots: deque[list[int]] = deque()
        """Slot number and bytes, the oldest first."""
        self._nbytes = 0

    def last_day_nbytes(self, now: float) -> int:
        """Return what was written in the last 24 hours."""
        oldest = int((now - DAY_S) // SLOT_S)
        while self._slots and self._slots[0][0] <= oldest:
            self._nbytes -= self._slots.popleft()[1]
        return self._nbytes

    def take(self, sizes: Sequence[int], now: float) -> int:
        """Return how many of these records may be written, the first first; they count as such."""
        if self.limit_nbytes is None:
            self._add(sum(sizes), now)
            return len(sizes)
        left = self.limit_nbytes - self.last_day_nbytes(now)
        num = taken = 0
        for nbytes in sizes:
            if taken + nbytes > left:
                break
            num, taken = num + 1, taken + nbytes
        self._add(taken, now)
        return num

    def give_back(self, nbytes: int, now: float) -> None:
        """Take back what was counted a moment ago and not written after all."""
        self._add(-nbytes, now)

    def found(self, nbytes: int, written: float, now: float) -> None:
        """Count a record that is there already, if it is younger than a day."""
        if now - written < DAY_S:
            self._add(nbytes, written)

    def _add(self, nbytes: int, at: float) -> None:
        number = int(at // SLOT_S)
        index = len(self._slots)
        while index and self._slots[index - 1][0] > number:
            index -= 1
        if not (index and self._slots[index - 1][0] == number):
            self._slots.insert(index, [number, 0])
            index += 1
        self._slots[index - 1][1] += nbytes
        self._nbytes += nbytes

    def check(self) -> None:
        """Assert that the sum is that of the slots, in order."""
        assert self._nbytes == sum(nbytes for _, nbytes in self._slots)
        numbers = [number for number, _ in self._slots]
        assert numbers == sorted(set(numbers))
