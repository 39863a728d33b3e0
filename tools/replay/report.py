"""A report: what a replay found, as the values that are written down and shown.

``describe_run`` gives what ``--json`` holds. Nothing in it depends on the clock or the machine:
the same trace, settings and seed give the same bytes.
"""

import math
from collections.abc import Sequence

from hicache.tools.replay.optimum import Sharing
from hicache.tools.replay.replaying import Replayed
from hicache.tools.replay.settings import finite
from hicache.tools.replay.tally import TIERS, Outcome
from hicache.tools.replay.workload import Job, Workload

NUM_INTERVALS = 60
"""Of the hit rate over time."""

DENOMINATORS = {
    "blocks": "pages hit / pages of all requests, refused ones included; the last page of a "
    "request counts whole",
    "tokens": "tokens hit, those of a page hit in part included / input tokens of all requests",
    "requests": "requests with at least one page from that tier / all requests",
    "full_blocks": "pages hit that are full / full pages of all requests",
    "mean_over_requests": "the mean of each request's own share of pages hit",
    "requests_all_hit": "requests whose every page was hit / all requests",
}


def describe_trace(workload: Workload, sharing: Sharing) -> dict[str, object]:
    """Return what is known of the trace."""
    return {
        **workload.describe(),
        "num_unique_pages": sharing.num_unique_pages,
        "longest_request_pages": sharing.longest_pages,
        "denominators": DENOMINATORS,
    }


def describe_run(replayed: Replayed) -> dict[str, object]:
    """Return what is known of one run, in the order in which it is written down."""
    tally, nbytes = replayed.tally, replayed.page_nbytes
    jobs, outcomes = replayed.workload.jobs, tally.outcomes
    num_warm = int(len(jobs) * replayed.settings.warm_up)
    prompt_tokens = sum(job.num_input_tokens for job in jobs)
    return {
        "config": {
            **replayed.settings.describe(),
            "page_size": replayed.workload.page_size,
            "page_nbytes": nbytes,
            "num_pages": {
                "device": replayed.num_device_pages,
                "host": replayed.num_host_pages,
                "storage": finite(replayed.num_storage_pages),
            },
        },
        "pages": {
            "referred": replayed.workload.num_pages,
            "unique": replayed.sharing.num_unique_pages,
        },
        "hit_rate": hit_rates(replayed, 0, len(jobs)),
        "other_hit_rates": other_hit_rates(replayed),
        "hit_rate_warm_up": hit_rates(replayed, 0, num_warm),
        "hit_rate_after_warm_up": hit_rates(replayed, num_warm, len(jobs)),
        "num_warm_up_requests": num_warm,
        "first_eviction_s": tally.first_eviction_s,
        "num_lost_output_pages": tally.num_lost_output_pages,
        "num_refused_requests": sum(outcome.is_refused for outcome in outcomes),
        "optimum": _optimum(replayed),
        "bytes": {
            "host_to_device": tally.num_loaded * nbytes,
            "device_to_host": tally.num_backed_up * nbytes,
            "storage_to_host": tally.num_fetched * nbytes,
            "host_to_storage": tally.num_stored * nbytes,
        },
        "evicted_pages": _evicted(replayed),
        "misses": dict(sorted(tally.missed.items())),
        "storage_bytes_per_prompt_token": _ratio(tally.num_stored * nbytes, prompt_tokens),
        "ttft_s": _percentiles([o.ttft_s for o in outcomes if not o.is_refused]),
        "over_time": hit_rate_over_time(replayed),
    }


def hit_rates(replayed: Replayed, first: int, last: int) -> dict[str, dict[str, float]]:
    """Return hit rates by tier of the requests from ``first`` to before ``last``."""
    jobs = replayed.workload.jobs[first:last]
    outcomes = replayed.tally.outcomes[first:last]
    page_size = replayed.workload.page_size
    blocks, tokens, requests = [0, 0, 0], [0, 0, 0], [0, 0, 0]
    for job, outcome in zip(jobs, outcomes, strict=True):
        start = 0
        for tier, num_pages in enumerate((outcome.device, outcome.host, outcome.storage)):
            end = start + num_pages
            blocks[tier] += num_pages
            tokens[tier] += _num_tokens(job, end, page_size) - _num_tokens(job, start, page_size)
            requests[tier] += num_pages > 0
            start = end
        tokens[TIERS.index(outcome.partial_tier)] += outcome.partial
    any_hit = sum(outcome.num_hit > 0 for outcome in outcomes)
    return {
        "blocks": _by_tier(blocks, sum(blocks), sum(job.num_pages for job in jobs)),
        "tokens": _by_tier(tokens, sum(tokens), sum(job.num_input_tokens for job in jobs)),
        "requests": _by_tier(requests, any_hit, len(jobs)),
    }


def other_hit_rates(replayed: Replayed) -> dict[str, float]:
    """Return hit rates of all tiers together with other denominators."""
    page_size = replayed.workload.page_size
    full = full_hit = all_hit = 0
    mean = 0.0
    jobs = replayed.workload.jobs
    for job, outcome in zip(jobs, replayed.tally.outcomes, strict=True):
        num_full = job.num_input_tokens // page_size
        full += num_full
        full_hit += min(outcome.num_hit, num_full)
        all_hit += outcome.num_hit == job.num_pages
        mean += _ratio(outcome.num_hit, job.num_pages)
    return {
        "full_blocks": _ratio(full_hit, full),
        "mean_over_requests": _ratio(mean, len(jobs)),
        "requests_all_hit": _ratio(all_hit, len(jobs)),
    }


def hit_rate_over_time(replayed: Replayed) -> list[dict[str, float]]:
    """Return hit rates by tier, in pages, of equal intervals of time; empty ones are left out."""
    jobs, outcomes = replayed.workload.jobs, replayed.tally.outcomes
    times = [outcome.arrived_s for outcome in outcomes]
    start = min(times)
    step = (max(times) - start) / NUM_INTERVALS or 1.0
    found: dict[int, list[tuple[Job, Outcome, int]]] = {}
    for job, outcome, seen in zip(jobs, outcomes, replayed.sharing.seen, strict=True):
        interval = min(int((outcome.arrived_s - start) / step), NUM_INTERVALS - 1)
        found.setdefault(interval, []).append((job, outcome, seen))
    result: list[dict[str, float]] = []
    for interval, here in sorted(found.items()):
        num_pages = sum(job.num_pages for job, _, _ in here)
        rates: dict[str, float] = {
            tier: _ratio(sum(getattr(outcome, tier) for _, outcome, _ in here), num_pages)
            for tier in TIERS
        }
        rates["infinite"] = _ratio(sum(seen for _, _, seen in here), num_pages)
        result.append({"time_s": round(interval * step, 6), **rates})
    return result


def _optimum(replayed: Replayed) -> dict[str, float | None]:
    """The optimum in pages, and how far below it the run is."""
    num_pages = replayed.workload.num_pages
    hit = _ratio(sum(outcome.num_hit for outcome in replayed.tally.outcomes), num_pages)
    infinite = _ratio(sum(replayed.sharing.seen), num_pages)
    known = replayed.min_hits
    least = None if known is None else _ratio(sum(known), num_pages)
    return {
        "infinite": infinite,
        "min": least,
        "gap_to_infinite": infinite - hit,
        "gap_to_min": None if least is None else least - hit,
    }


def _evicted(replayed: Replayed) -> dict[str, dict[str, int]]:
    evicted: dict[str, dict[str, int]] = {tier: {} for tier in TIERS}
    for (tier, reason), num_pages in sorted(replayed.tally.evicted.items()):
        evicted[tier][reason] = num_pages
    if replayed.num_evicted_records:
        evicted["storage"]["evicted_room"] = replayed.num_evicted_records
    return evicted


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        f"p{percent}": (
            round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 9)
            if ordered
            else 0.0
        )
        for percent in (50, 90, 99)
    }


def _num_tokens(job: Job, num_pages: int, page_size: int) -> int:
    return min(num_pages * page_size, job.num_input_tokens)


def _by_tier(counts: list[int], total: int, of: int) -> dict[str, float]:
    rates: dict[str, float] = {
        tier: _ratio(count, of) for tier, count in zip(TIERS, counts, strict=True)
    }
    return {**rates, "total": _ratio(total, of)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
