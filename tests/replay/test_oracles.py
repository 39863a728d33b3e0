"""The replay against numbers that were worked out without it."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from hicache.tools.replay.optimum import Sharing, belady, find_sharing
from hicache.tools.replay.replaying import Replayed, replay
from hicache.tools.replay.report import describe_run, hit_rates, other_hit_rates
from hicache.tools.replay.settings import Settings
from hicache.tools.replay.workload import Workload
from tests.replay.traces import SHARED, conversation, needs_shared

pytestmark = [needs_shared, pytest.mark.slow]

CAPACITIES = ["inf", "100000", "50000", "30000", "10000", "1000"]
ALWAYS = (0, 3, 4, 5)
"""Of those, what is tried in every run of the tests; a soak tries all."""
ORACLE = SHARED / "oracles" / "conversation_replay.json"
NUM_SOME = 1500
"""Requests that are enough where whole lists are compared, not rates."""


def oracle() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ORACLE.read_text())
    return found


@cache
def run(l1: str, l2: str = "none", write: str = "write_through") -> Replayed:
    """Replay the whole trace, once for all tests."""
    workload, sharing = conversation()
    return replay(workload, Settings(l1=l1, l2=l2, write=write, is_sequential=True), sharing)


@cache
def some() -> tuple[Workload, Sharing]:
    """Return the first requests of the trace."""
    workload, _ = conversation()
    part = replace(workload, jobs=workload.jobs[:NUM_SOME])
    return part, find_sharing(part)


def run_some(settings: Settings) -> Replayed:
    workload, sharing = some()
    return replay(workload, replace(settings, is_sequential=True), sharing)


def rates(replayed: Replayed) -> dict[str, dict[str, float]]:
    return hit_rates(replayed, 0, len(replayed.workload.jobs))


def one_tier(index: int) -> Replayed:
    return run(f"{CAPACITIES[index]}p" if index else "inf")


def check_one_tier(indices: Iterable[int]) -> None:
    expected = oracle()["one_tier_block_hit_rate"]["lru_leaf_only"]
    for index in indices:
        found = round(rates(one_tier(index))["blocks"]["total"], 4)
        assert (CAPACITIES[index], found) == (CAPACITIES[index], expected[index])


def check_min(indices: Iterable[int]) -> None:
    expected = oracle()["one_tier_block_hit_rate"]["belady_min_flat"]
    workload, sharing = conversation()
    for index in indices:
        found = round(sum(belady(sharing, float(CAPACITIES[index]))) / workload.num_pages, 4)
        assert (CAPACITIES[index], found) == (CAPACITIES[index], expected[index])


def check_write_back(first: int, second: int) -> None:
    one, both = rates(run(f"{first}p")), rates(run(f"{first + second}p"))

    two_tiers = rates(run(f"{first}p", f"{second}p", "write_back"))["blocks"]

    assert two_tiers["device"] == pytest.approx(one["blocks"]["total"], abs=0.001)
    assert two_tiers["total"] == pytest.approx(both["blocks"]["total"], abs=0.001)


def test_lru_min_and_write_back_are_those_of_the_oracle() -> None:
    # One test, so that the runs are shared also where tests run in several processes.
    check_one_tier(ALWAYS)
    check_min((0, 4, 5))
    check_write_back(10_000, 20_000)


@pytest.mark.soak
def test_all_capacities_are_those_of_the_oracle(is_full: bool) -> None:
    if is_full:
        check_one_tier(range(6))
        check_min(range(6))
        check_write_back(10_000, 40_000)
        longest = conversation()[1].longest_pages
        assert round(rates(run(f"{longest}p"))["blocks"]["total"], 4) == 0.0419


def test_the_other_denominators_are_those_of_the_oracle() -> None:
    expected = oracle()["other_denominators_at_inf"]

    replayed = run("inf")

    found, other = rates(replayed), other_hit_rates(replayed)
    assert round(found["tokens"]["total"], 4) == expected["tokens"]
    assert round(found["requests"]["total"], 4) == expected["requests_with_any_hit"]
    assert round(other["full_blocks"], 4) == expected["full_blocks_only"]
    assert round(other["mean_over_requests"], 4) == expected["mean_over_requests"]
    assert round(other["requests_all_hit"], 4) == expected["requests_all_hit"]


def test_depth_first_order_reaches_the_optimum_with_room_for_the_longest_request() -> None:
    workload, sharing = conversation()
    ordered = sorted(workload.jobs, key=lambda job: list(memoryview(job.tokens).cast("i")))
    jobs = [replace(job, index=index, time_s=float(index)) for index, job in enumerate(ordered)]

    replayed = replay(
        replace(workload, jobs=jobs), Settings(l1=f"{sharing.longest_pages}p", is_sequential=True)
    )

    assert sum(o.num_hit for o in replayed.tally.outcomes) == sum(sharing.seen)
    assert round(sum(sharing.seen) / workload.num_pages, 4) == 0.3664


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"])
def test_with_room_for_everything_every_eviction_policy_hits_all_there_is(eviction: str) -> None:
    replayed = run_some(Settings(l1="inf", eviction=eviction))

    assert [o.num_hit for o in replayed.tally.outcomes] == replayed.sharing.seen


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_with_room_for_everything_every_write_policy_hits_all_there_is(write: str) -> None:
    replayed = run_some(Settings(l1="1000p", l2="inf", l3="inf", write=write))

    assert [o.num_hit for o in replayed.tally.outcomes] == replayed.sharing.seen


def test_the_same_trace_gives_the_same_bytes() -> None:
    workload, _ = some()
    workload = replace(workload, jobs=workload.jobs[:500])
    settings = Settings(l1="500p", l2="500p", l3="inf", prefill_tokens_per_s=60_000.0)

    first, again = (json.dumps(describe_run(replay(workload, settings))) for _ in range(2))

    assert first == again
