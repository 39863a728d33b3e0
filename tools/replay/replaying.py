"""One replay: a workload and settings in, a result out. Deterministic."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.keys import TOKEN_NBYTES
from hicache.planner import PlannerConfig
from hicache.sizes import Size
from hicache.tools.replay.engine import Engine
from hicache.tools.replay.optimum import Sharing, belady, find_sharing
from hicache.tools.replay.settings import (
    Hops,
    Settings,
    min_store_users,
    parse_size,
    prefetching,
    rank,
    writing,
)
from hicache.tools.replay.slots import PlainSlots
from hicache.tools.replay.storage import VirtualStore
from hicache.tools.replay.tally import Outcome, Tally
from hicache.tools.replay.workload import Workload
from hicache.tools.replay.world import World


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came out of one run, request by request and in all."""

    settings: Settings
    workload: Workload
    sharing: Sharing
    tally: Tally
    num_device_pages: int
    num_host_pages: int
    num_storage_pages: float
    page_nbytes: int
    num_evicted_records: int
    """Pages that left storage because it was full."""
    min_hits: list[int] | None
    """Pages that each request hits under Belady's MIN of all tiers together, if asked for."""


def replay(workload: Workload, settings: Settings, sharing: Sharing | None = None) -> Replayed:
    """Replay a workload. ``sharing`` is that of the workload, if it is known already."""
    settings.check()
    sharing = sharing or find_sharing(workload)
    world, tally = open_world(workload, settings, sharing)
    with _uncollected():
        Engine(settings, world, tally).run(workload.jobs)
    config = world.planner.config
    storage = _num_pages(settings.l3, workload.page_size, config.page_nbytes, math.inf)
    min_hits = None
    if settings.has_min:
        min_hits = belady(sharing, config.device_pages + config.host_pages + storage)
    return Replayed(
        settings, workload, sharing, tally, config.device_pages, config.host_pages, storage,
        config.page_nbytes, world.store.num_evicted, min_hits,
    )  # fmt: skip


def open_world(workload: Workload, settings: Settings, sharing: Sharing) -> tuple[World, Tally]:
    """Return an empty world of these settings, and what counts for it."""
    jobs = workload.jobs
    tally = Tally(
        sharing.seen, sharing.kept, [Outcome() for _ in jobs], workload.grain_tokens,
        workload.page_grains,
    )  # fmt: skip
    page_nbytes = workload.page_size * settings.token_nbytes
    config = planner_config(workload, settings, sharing)
    records = _num_pages(settings.l3, workload.page_size, page_nbytes, math.inf)
    hops = Hops() if settings.is_sequential else settings.hops
    return World(config, hops, VirtualStore(records), tally), tally


def planner_config(workload: Workload, settings: Settings, sharing: Sharing) -> PlannerConfig:
    """Return what the planner is told: its tokens are grains, but the bytes of pages are real."""
    page_nbytes = workload.page_size * settings.token_nbytes
    at_once = 1 if settings.is_sequential else settings.concurrency
    left = sum(len(job.output) for job in workload.jobs) // (TOKEN_NBYTES * workload.page_grains)
    most = workload.num_pages + left + len(workload.jobs)  # and a page copied for each
    ample = min(sharing.num_unique_pages + at_once * (sharing.longest_pages + 1), most) + 1
    device = int(_num_pages(settings.l1, workload.page_size, page_nbytes, ample))
    host = int(_num_pages(settings.l2, workload.page_size, page_nbytes, ample))
    is_timed = math.isfinite(settings.prefill_tokens_per_s) and not settings.is_sequential
    low_water = 0 if settings.is_sequential or not host else int(device * settings.low_water)
    return PlannerConfig(
        page_size=workload.page_grains,
        page_nbytes=page_nbytes,
        device_pages=device,
        host_pages=host,
        has_storage=host > 0 and parse_size(settings.l3) is not None,
        device_rank=rank(settings.eviction),
        host_rank=rank(settings.host_eviction or settings.eviction),
        writing=writing(settings.write),
        prefetch=prefetching(settings.prefetch),
        min_store_users=min_store_users(settings.admission),
        low_water_pages=low_water,
        # A store without end need not know what is used.
        touch_interval_s=math.inf if settings.l3 == "inf" else 60.0,
        prefill_tokens_per_s=(
            settings.prefill_tokens_per_s / workload.grain_tokens if is_timed else None
        ),
        slots=PlainSlots,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from walking over all nodes again and again: what leaves the
    trees is free of cycles, and is freed at once without it. It took a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _num_pages(text: str, page_size: int, page_nbytes: int, unlimited: float) -> float:
    size = parse_size(text)
    if size is None:
        return 0
    if not isinstance(size, Size):
        return unlimited
    num_pages = size.num_pages(page_size, page_nbytes)
    if num_pages < 1:
        raise ConfigError(f"{text}: less than one page, which is {page_nbytes:,} bytes")
    return num_pages
