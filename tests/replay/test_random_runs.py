"""Random loads with random settings: every page is accounted for, the planner stays straight."""

import math
import random

import pytest

from hicache.tools.replay.engine import Engine
from hicache.tools.replay.optimum import find_sharing
from hicache.tools.replay.replaying import open_world
from hicache.tools.replay.settings import Hop, Hops, Settings
from hicache.tools.replay.workload import Pace, Workload, load
from tests.replay.traces import trace_of

BLOCK = 4


@pytest.mark.parametrize("first_seed", [0, 20])
def test_every_page_of_a_random_run_is_accounted_for(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        check(random.Random(seed))


@pytest.mark.soak
def test_every_page_of_many_random_runs_is_accounted_for(is_full: bool) -> None:
    for seed in range(100, 5_000 if is_full else 110):
        check(random.Random(seed))


def check(rng: random.Random) -> None:
    """Replay one load, and add up what came of it."""
    workload = workload_of(rng)
    sharing = find_sharing(workload)
    settings = settings_for(rng, max(job.num_pages for job in workload.jobs))
    world, tally = open_world(workload, settings, sharing)

    Engine(settings, world, tally).run(workload.jobs)

    world.planner.check()
    num_hit = sum(outcome.num_hit for outcome in tally.outcomes)
    assert num_hit + sum(tally.missed.values()) == workload.num_pages
    for outcome, num_kept in zip(tally.outcomes, sharing.kept, strict=True):
        assert outcome.num_hit <= num_kept
        assert outcome.ttft_s >= 0


def workload_of(rng: random.Random) -> Workload:
    """Return chats that are continued, sometimes from the middle, with any pages and outputs."""
    chats: list[list[int]] = [[]]
    requests: list[list[int]] = []
    parents: list[int | None] = []
    sessions: list[str] = []
    next_block = 1
    for _ in range(50):
        number = rng.randrange(len(chats))
        is_continued = number > 0 and rng.random() < 0.6
        chat = chats[number] if is_continued else chats[number][: rng.randrange(8)]
        num_new = rng.randrange(1, 6)
        chats.append([*chat, *range(next_block, next_block + num_new)])
        next_block += num_new
        requests.append(chats[-1])
        parents.append(number - 1 if is_continued else None)
        sessions.append(str(number))
    has_times = rng.random() < 0.6
    trace = trace_of(
        requests, block_size=BLOCK, has_times=has_times, sessions=sessions, parents=parents,
        gap_s=rng.choice([0, 0.01, 1, 30]) if has_times else 0.0,
        num_output_tokens=rng.choice([0, 3, 9, 40]),
    )  # fmt: skip
    paces = [None] if has_times else [Pace(num_sessions=3), Pace(sessions_per_s=1.0)]
    return load(
        trace, page_size=rng.choice([2, 4, 8, 16]), pace=rng.choice(paces),
        has_outputs=rng.random() < 0.6,
    )  # fmt: skip


def settings_for(rng: random.Random, longest_pages: int) -> Settings:
    """Return settings with small tiers and slow hops; some requests may not fit."""

    def pages(low: int, high: int) -> str:
        return f"{rng.randrange(low, high)}p"

    hops = [Hop(rng.choice([math.inf, 1e2, 1e3, 1e4]), rng.choice([0, 0.01, 1])) for _ in range(4)]
    has_host = rng.random() < 0.8
    return Settings(
        l1=pages(max(1, longest_pages - 2), longest_pages * 3 + 2),
        l2=pages(1, 40) if has_host else "none",
        l3=rng.choice(["none", "inf", pages(1, 60)]) if has_host else "none",
        eviction=rng.choice(["lru", "slru", "lfu", "fifo"]),
        write=rng.choice(["write_through", "write_through_selective", "write_back"]),
        admission=rng.choice(["first", "second"]),
        prefetch=rng.choice(["best_effort", "wait_complete", "timeout"]),
        token_nbytes=10,
        is_sequential=rng.random() < 0.2,
        concurrency=rng.choice([1, 3, 256]),
        prefill_tokens_per_s=rng.choice([math.inf, 10.0, 1000.0]),
        decode_tokens_per_s=rng.choice([math.inf, 5.0, 100.0]),
        layer_groups=rng.choice([1, 4]),
        low_water=rng.choice([0, 0.1]),
        hops=Hops(*hops),
    )
