"""Measured rates: what a tier or a prefill costs, learnt from what it has cost."""

_MEMORY = 0.75
"""What the past still counts after a new measurement."""

_FORGIVENESS = 0.8
"""Factor on a link's cost each time it was passed over, so that it gets another chance."""


class Rate:
    """Seconds per unit over the last few measurements; 0 until something was measured."""

    def __init__(self, units_per_s: float | None = None) -> None:
        """``units_per_s`` is a seed, worth one second of measuring."""
        self._units = units_per_s or 0.0
        self._seconds = 1.0 if units_per_s else 0.0

    def measured(self, units: float, seconds: float) -> None:
        """Learn from an operation of so many units that took so long."""
        self._units = _MEMORY * self._units + units
        self._seconds = _MEMORY * self._seconds + seconds

    def seconds(self, units: float) -> float:
        """Return what so many units would cost."""
        return units * self._seconds / self._units if self._units else 0.0

    def passed_over(self) -> None:
        """Lower a cost that was too high to pay, so that the link is tried again some day."""
        self._seconds *= _FORGIVENESS


class Link(Rate):
    """The rate of a link that carries several operations at a time.

    The time in which two of them overlap counts once: what they share is the link.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counted_until = float("-inf")

    def landed(self, units: float, started: float, landed: float) -> None:
        """Learn from an operation that has landed, told in any order."""
        self.measured(units, max(0.0, landed - max(started, self._counted_until)))
        self._counted_until = max(self._counted_until, landed)
