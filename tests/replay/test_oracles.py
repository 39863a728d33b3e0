"""The replay against numbers that were worked out without it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from hicache.tools.replay.optimum import belady
from hicache.tools.replay.replaying import Replayed, replay
from hicache.tools.replay.report import describe_run, hit_rates, other_hit_rates
from hicache.tools.replay.settings import Settings
from hicache.tools.replay.workload import Job, Workload
from tests.replay.traces import SHARED, conversation, needs_shared

pytestmark = [needs_shared, pytest.mark.slow]

CAPACITIES = ["inf", "100000", "50000", "30000", "10000", "1000"]
ORACLE = SHARED / "oracles" / "conversation_replay.json"


def oracle() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ORACLE.read_text())
    return found


def run(l1: str, l2: str = "none", l3: str = "none", write: str = "write_through") -> Replayed:
    workload, sharing = conversation()
    settings = Settings(l1=l1, l2=l2, l3=l3, write=write, is_sequential=True)
    return replay(workload, settings, sharing)


def rates(replayed: Replayed) -> dict[str, dict[str, float]]:
    return hit_rates(replayed, 0, len(replayed.workload.jobs))


@pytest.mark.parametrize("index", range(6))
def test_one_tier_with_lru_hits_what_the_oracle_says(index: int) -> None:
    expected = oracle()["one_tier_block_hit_rate"]["lru_leaf_only"][index]

    replayed = run(f"{CAPACITIES[index]}p" if index else "inf")

    assert round(rates(replayed)["blocks"]["total"], 4) == expected


def test_the_other_denominators_are_those_of_the_oracle() -> None:
    expected = oracle()["other_denominators_at_inf"]

    replayed = run("inf")

    found, other = rates(replayed), other_hit_rates(replayed)
    assert round(found["tokens"]["total"], 4) == expected["tokens"]
    assert round(found["requests"]["total"], 4) == expected["requests_with_any_hit"]
    assert round(other["full_blocks"], 4) == expected["full_blocks_only"]
    assert round(other["mean_over_requests"], 4) == expected["mean_over_requests"]
    assert round(other["requests_all_hit"], 4) == expected["requests_all_hit"]


@pytest.mark.parametrize("index", range(6))
def test_min_is_that_of_the_oracle(index: int) -> None:
    expected = oracle()["one_tier_block_hit_rate"]["belady_min_flat"][index]
    workload, sharing = conversation()

    hits = belady(sharing, float(CAPACITIES[index]))

    assert round(sum(hits) / workload.num_pages, 4) == expected


def test_depth_first_order_reaches_the_optimum_with_room_for_the_longest_request() -> None:
    workload, sharing = conversation()
    jobs = sorted(workload.jobs, key=lambda job: list(memoryview(job.tokens).cast("i")))
    in_depth = _with_jobs(workload, jobs)

    replayed = replay(in_depth, Settings(l1=f"{sharing.longest_pages}p", is_sequential=True))

    assert sum(o.num_hit for o in replayed.tally.outcomes) == sum(sharing.seen)
    assert round(sum(sharing.seen) / workload.num_pages, 4) == 0.3664
    arrival = rates(run(f"{sharing.longest_pages}p"))["blocks"]["total"]
    assert round(arrival, 4) == 0.0419


@pytest.mark.parametrize(("first", "second"), [(10_000, 20_000), (10_000, 40_000)])
def test_write_back_makes_one_cache_of_two_tiers(first: int, second: int) -> None:
    one, both = rates(run(f"{first}p")), rates(run(f"{first + second}p"))

    two_tiers = rates(run(f"{first}p", f"{second}p", write="write_back"))["blocks"]

    assert two_tiers["device"] == pytest.approx(one["blocks"]["total"], abs=0.001)
    assert two_tiers["total"] == pytest.approx(both["blocks"]["total"], abs=0.001)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"])
def test_with_room_for_everything_every_eviction_policy_hits_all_there_is(eviction: str) -> None:
    workload, sharing = conversation()
    settings = Settings(l1="inf", eviction=eviction, is_sequential=True)

    replayed = replay(workload, settings, sharing)

    assert [o.num_hit for o in replayed.tally.outcomes] == sharing.seen


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_with_room_for_everything_every_write_policy_hits_all_there_is(write: str) -> None:
    _, sharing = conversation()

    replayed = run("1000p", "inf", "inf", write=write)

    assert [o.num_hit for o in replayed.tally.outcomes] == sharing.seen


def test_the_same_trace_gives_the_same_bytes() -> None:
    first = json.dumps(describe_run(run("10000p", "10000p", "inf")))
    second = json.dumps(describe_run(run("10000p", "10000p", "inf")))

    assert first == second


def _with_jobs(workload: Workload, jobs: list[Job]) -> Workload:
    ordered = [
        replace(job, index=index, time_s=float(index), after=None) for index, job in enumerate(jobs)
    ]
    return replace(workload, jobs=ordered)
