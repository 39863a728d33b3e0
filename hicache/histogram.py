"""Durations by bucket, as Prometheus wants them."""

from bisect import bisect_left
from dataclasses import dataclass, field

STORAGE_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
"""Of calls to storage: from a warm page of a local disk to one that is far too late."""


@dataclass(slots=True)
class Histogram:
    """How many durations were how long. One thread adds; any may copy."""

    bounds_s: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """One a bucket, not cumulative; the last is for what is longer than every bound."""
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds_s) + 1)

    @property
    def num(self) -> int:
        """Durations in all."""
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> "Histogram":
        """Return a snapshot."""
        return Histogram(self.bounds_s, self.counts.copy(), self.sum_s)
