"""``/metrics``: what the engine and its cache count, in Prometheus's text form.

Nothing is counted here: a scrape reads the engine's own totals, at the cost of a scrape only.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hicache.engine.cache_metrics import cache_metrics
from hicache.engine.engine import Engine
from hicache.engine.metric_families import by_label, counter, gauge, histograms

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineCollector(Collector):
    """The totals of one engine, as they are when scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        yield from self._tokens()
        yield from self._requests()
        yield from self._time()
        if (stats := self._engine.cache.stats()) is not None:
            yield from cache_metrics(stats)

    def _tokens(self) -> Iterator[Metric]:
        counters = self._engine.counters
        yield by_label(
            "hit_tokens", "Prompt tokens not computed", "tier", counters.hit_tokens.items()
        )
        yield counter("prompt_tokens", "Of requests that have begun", counters.num_prompt_tokens)
        yield counter("computed_tokens", "Prompt tokens computed", counters.num_computed_tokens)
        yield counter("output_tokens", "Tokens generated", counters.num_output_tokens)

    def _requests(self) -> Iterator[Metric]:
        engine, counters = self._engine, self._engine.counters
        yield gauge("waiting_requests", "Requests that do not run yet", engine.num_waiting)
        yield gauge("running_requests", "Requests that hold L1 pages", engine.num_running)
        yield by_label(
            "finished_requests", "Requests that ended", "reason", counters.finished.items()
        )
        yield counter("preempted_requests", "Requests that gave way", counters.num_preemptions)
        yield counter("revoked_leases", "Leases of which a load failed", counters.num_revoked)

    def _time(self) -> Iterator[Metric]:
        engine, counters = self._engine, self._engine.counters
        yield counter("steps", "Steps that computed something", counters.num_steps)
        yield counter("failed_steps", "Steps that raised", counters.num_failed_steps)
        text = "Steps that the device had no memory for"
        yield counter("out_of_memory_steps", text, counters.num_out_of_memory)
        yield counter("step_seconds", "Wall clock in steps", counters.step_seconds)
        yield counter("cache_seconds", "CPU time in calls of the cache", engine.cache_seconds)
        yield histograms(
            "time_to_first_token_seconds", "By the slowest tier that was hit", "tier",
            counters.first_token_s.items(),
        )  # fmt: skip


def render(engine: Engine) -> bytes:
    """Return the page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine))
    return generate_latest(registry)
