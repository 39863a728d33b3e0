"""What is counted while a replay runs: from the planner's facts and its grants, nothing else."""

from collections import Counter
from dataclasses import dataclass, field

from hicache.actions import Fact, HitTokens, Tier

TIERS: tuple[Tier, ...] = ("device", "host", "storage")

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
    arrived_s: float = 0.0
    """Later than its time in the trace where it had to wait for the one that it continues."""
    granted_s: float = 0.0
    ttft_s: float = 0.0
    is_refused: bool = False
    partial: int = 0
    """Tokens that it hit of the page behind those, and where."""
    partial_tier: Tier = "device"

    @property
    def num_hit(self) -> int:
        """Whole pages that it need not compute."""
        return self.device + self.host + self.storage


@dataclass(slots=True)
class Tally:
    """Counts of one run."""

    seen: list[int]
    """Leading pages of each request that an earlier one had: the rest was never seen."""
    num_pages: list[int]
    """Leading pages of each request that it could have hit."""
    outcomes: list[Outcome]
    grain_tokens: int = 1
    """Tokens that a token of the planner stands for."""
    page_grains: int = 1
    """Of those, in a page."""
    num_lost_output_pages: int = 0
    """Pages of outputs that found no room in L1."""
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
        """Note what a request hit, counted in grains."""
        outcome, size = self.outcomes[index], self.page_grains
        outcome.device, outcome.host = hit.device // size, hit.host // size
        outcome.storage = hit.storage // size
        outcome.granted_s = now
        if hit.total % size:
            outcome.partial = hit.total % size * self.grain_tokens
            is_of = {"device": hit.device, "host": hit.host, "storage": hit.storage}
            outcome.partial_tier = next(tier for tier in TIERS if is_of[tier] % size)

    def output_not_kept(self, index: int) -> None:
        """Note that what a request misses as computed meanwhile is an output that was lost."""
        missed = self.outcomes[index].missed
        for place, (reason, num_pages) in enumerate(missed):
            if reason == "computed_meanwhile":
                missed[place] = ("output_not_kept", num_pages)
                self.missed[reason] -= num_pages
                self.missed["output_not_kept"] += num_pages
        self.missed += Counter()  # without what is 0 now

    def unfinished(self, index: int, num_pages: int) -> None:
        """Note pages of a request that nobody can find: they are not full, and not kept."""
        if num_pages and not self.outcomes[index].is_refused:
            self._miss(index, "unfinished", num_pages)

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
