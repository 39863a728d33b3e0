"""What a cache counts, as metrics: pages by tier and reason, bytes by direction, storage."""

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.core import Metric

from hicache.cache import CacheStats
from hicache.engine.metric_families import by_label, by_labels, counter, gauge, gauges, histograms
from hicache.store import StoreStats


def cache_metrics(stats: CacheStats) -> Iterator[Metric]:
    """Yield every metric of a cache."""
    yield gauges("pages", "Capacity in pages", "tier", stats.num_pages.items())
    yield gauges("used_pages", "Pages in use", "tier", stats.num_used_pages.items())
    used = {tier: pages * stats.page_nbytes for tier, pages in stats.num_used_pages.items()}
    yield gauges("used_bytes", "Bytes in use", "tier", used.items())
    yield gauge("operations", "Copies, probes, fetches and stores now", stats.num_operations)
    yield gauge("namespaces", "Namespaces that have pages in L1 or L2", stats.num_namespaces)
    yield from _pages(stats)
    yield by_label("moved_bytes", "Bytes of KV copied", "direction", _moved(stats).items())
    if stats.store is not None:
        yield from _storage(stats.store)


def _pages(stats: CacheStats) -> Iterator[Metric]:
    """Yield one counter for each thing that happens to pages, by tier and reason."""
    kinds: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for (kind, tier, reason), count in stats.pages.items():
        kinds[kind][tier, reason] = count
    for kind, values in sorted(kinds.items()):
        text = f"Pages {kind.replace('_', ' ')}"
        yield by_labels(f"{kind}_pages", text, ("tier", "reason"), values.items())


def _moved(stats: CacheStats) -> dict[str, float]:
    moved = {"load": 0.0, "back_up": 0.0}
    for (kind, _, _), count in stats.pages.items():
        if kind == "loaded":
            moved["load"] += count * stats.page_nbytes
        elif kind == "backed_up":
            moved["back_up"] += count * stats.page_nbytes
    if stats.store is not None:
        moved["fetch"] = stats.store.read_nbytes
        moved["store"] = stats.store.written_nbytes
    return moved


def _storage(stats: StoreStats) -> Iterator[Metric]:
    yield gauge("storage_up", "1 where the backend may be called", stats.is_up)
    yield gauge("storage_full", "1 where storing is suspended for want of room", stats.is_full)
    yield counter("storage_breaks", "Times the backend was detached", stats.num_breaks)
    yield counter("storage_corrupt_pages", "Records that were not true", stats.num_corrupt_pages)
    yield gauge("storage_foreign_pages", "Sealed with other keys", stats.num_foreign_pages)
    yield counter("storage_retries", "Calls tried again", stats.num_retries)
    yield by_label("storage_dropped_pages", "Given up", "reason", stats.dropped.items())
    yield by_label("storage_missed_pages", "Not there", "kind", stats.missed.items())
    yield by_label("storage_errors", "Calls that failed", "reason", stats.errors.items())
    yield gauges("storage_queued_pages", "Pages that wait", "kind", stats.num_queued.items())
    yield gauge("storage_lent_pages", "L2 pages that a call holds", stats.num_lent_pages)
    yield gauge("storage_overdue_pages", "Of calls given up", stats.num_overdue_pages)
    if stats.backend is not None:
        yield gauge("storage_records", "Records stored", stats.backend.num_records)
        yield gauge("storage_used_bytes", "Bytes stored", stats.backend.nbytes)
        yield counter("storage_evicted_records", "Evicted", stats.backend.num_evicted)
    yield histograms(
        "storage_call_seconds", "Calls that returned", "kind", stats.call_seconds.items()
    )
    yield gauge("storage_day_written_bytes", "Written in 24 hours", stats.day_written_nbytes)
    yield gauges("storage_tenant_bytes", "By tenant", "tenant", stats.tenant_nbytes.items())
    evicted = stats.num_share_evicted_pages
    yield counter("storage_share_evicted_pages", "Of tenants over their share", evicted)
