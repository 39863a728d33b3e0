"""Measured rates: what a tier or a prefill costs, learnt from what it has cost."""

_WEIGHT = 0.25
"""Of a new measurement against the past."""

_FORGIVENESS = 0.8
"""Factor on a link's cost each time it was passed over, so that it gets another chance."""


class Rate:
    """Seconds per unit, as a running average; 0 until something was measured."""

    def __init__(self, units_per_s: float | None = None) -> None:
        self.seconds_per_unit = 1 / units_per_s if units_per_s else 0.0

    def measured(self, units: float, seconds: float) -> None:
        """Learn from an operation of so many units that took so long."""
        if units <= 0:
            return
        cost = seconds / units
        known = self.seconds_per_unit
        self.seconds_per_unit = known + _WEIGHT * (cost - known) if known else cost

    def seconds(self, units: float) -> float:
        """Return what so many units would cost."""
        return units * self.seconds_per_unit

    def passed_over(self) -> None:
        """Lower a cost that was too high to pay, so that the link is tried again some day."""
        self.seconds_per_unit *= _FORGIVENESS
