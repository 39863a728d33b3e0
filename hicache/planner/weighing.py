"""Load or recompute: what bringing pages up costs, against computing them.

Rates are learnt from what has happened. A link that was too slow is believed to be a little
faster each time it is passed over, so that it is tried again some day.
"""

from hicache.planner.config import PlannerConfig
from hicache.rates import Link, Rate


class Weighing:
    """The measured rates of prefill, loads and fetches, and what follows from them."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self.prefill = Rate(config.prefill_tokens_per_s)
        """Of computing, in tokens."""
        self._loads = Link()
        self._fetches = Link()

    def patience_s(self, num_pages: int) -> float:
        """Return how long a request may wait for so many pages from storage."""
        num_tokens = num_pages * self._config.page_size
        return self._config.prefetch.patience_s(num_tokens, self.prefill.seconds(num_tokens))

    def loaded(self, num_pages: int, started: float, now: float, seconds: float | None) -> None:
        """Learn from a load that has landed; it took ``seconds``, if that is known."""
        if seconds is None:
            self._loads.landed(num_pages, started, now)
        else:
            self._loads.measured(num_pages, seconds)

    def fetched(self, num_pages: int, started: float, landed: float) -> None:
        """Learn from a fetch that has landed, perhaps long before we heard of it."""
        self._fetches.landed(num_pages, started, landed)

    def is_load_too_slow(self, num_pages: int) -> bool:
        """Whether loading so many pages would take longer than computing them."""
        return self._is_too_slow(self._loads, num_pages)

    def is_fetch_too_slow(self, num_pages: int) -> bool:
        """Whether fetching so many pages would take longer than computing them."""
        return self._is_too_slow(self._fetches, num_pages)

    def passed_over_load(self) -> None:
        """Note that pages were computed though L2 has them."""
        self._loads.passed_over()

    def passed_over_fetch(self) -> None:
        """Note that pages were computed though storage has them."""
        self._fetches.passed_over()

    def _is_too_slow(self, link: Link, num_pages: int) -> bool:
        compute_s = self.prefill.seconds(num_pages * self._config.page_size)
        return 0 < compute_s < link.seconds(num_pages)
