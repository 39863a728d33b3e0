"""What is counted while a replay runs: from the planner's facts and its grants, nothing else."""

from collections import Counter
from dataclasses import dataclass, field

from hicache.actions import Fact, HitTokens

EVICTIONS = ("evicted", "dropped", "demoted")

MISSED_OF_EVICTED = frozenset(
    [
        "evicted_from_device",
        "evicted_from_host",
        "evicted_from_storage",
        "not_admitted",
        "not_written_down",
    ]
)


@dataclass(slots=True)
class Outcome:
    """What became of one request."""

    device: int = 0
    """Pages that it hit, by the tier where they were."""
    host: int = 0
    storage: int = 0
    missed: list[tuple[str, int]] = field(default_factory=list)
    """Runs of pages that it did not hit, in order, each with the reason."""
    granted_s: float = 0.0
    ttft_s: float = 0.0
    is_refused: bool = False

    @property
    def num_hit(self) -> int:
        """Pages that it need not compute."""
        return self.device + self.host + self.storage


@dataclass(slots=True)
class Tally:
    """Counts of one run."""

    seen: list[int]
    """Leading pages of each request that an earlier one had: the rest was never seen."""
    num_pages: list[int]
    """Pages of each request."""
    outcomes: list[Outcome]
    num_loaded: int = 0
    num_backed_up: int = 0
    num_fetched: int = 0
    num_stored: int = 0
    evicted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Pages that left a tier, by tier and reason."""
    missed: Counter[str] = field(default_factory=Counter)
    first_eviction_s: float | None = None
    """When L1 was full for the first time."""

    def granted(self, index: int, hit: HitTokens, now: float) -> None:
        """Note what a request hit, in pages of one pseudo-token each."""
        outcome = self.outcomes[index]
        outcome.device, outcome.host, outcome.storage = hit.device, hit.host, hit.storage
        outcome.granted_s = now

    def refused(self, index: int, num_pages: int) -> None:
        """Note that a request is longer than L1: it hits nothing, and its pages count."""
        self.outcomes[index].is_refused = True
        self._miss(index, "refused", num_pages)

    def add(self, facts: list[Fact], now: float) -> None:
        """Take note of what has happened."""
        for fact in facts:
            if fact.kind == "missed":
                assert fact.request is not None
                self._explain(fact.request, fact.reason, fact.num_pages)
            elif fact.kind in EVICTIONS:
                self.evicted[fact.tier, f"{fact.kind}_{fact.reason}"] += fact.num_pages
                if self.first_eviction_s is None and fact.tier == "device":
                    self.first_eviction_s = now

    def _explain(self, index: int, reason: str, num_pages: int) -> None:
        """Split what was missed into what had been there and what is new.

        The planner gives the reason of the first page for all behind it that it does not know.
        """
        if reason != "never_seen" and reason not in MISSED_OF_EVICTED:
            self._miss(index, reason, num_pages)
            return
        start = self.num_pages[index] - num_pages  # what is not known goes on to the end
        num_seen = min(num_pages, max(0, self.seen[index] - start))
        if num_seen:
            known = "computed_meanwhile" if reason == "never_seen" else reason
            self._miss(index, known, num_seen)
        if num_pages > num_seen:
            self._miss(index, "never_seen", num_pages - num_seen)

    def _miss(self, index: int, reason: str, num_pages: int) -> None:
        self.outcomes[index].missed.append((reason, num_pages))
        self.missed[reason] += num_pages
