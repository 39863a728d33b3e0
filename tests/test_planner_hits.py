"""What a request finds, tier by tier, and to what part of a page."""

import pytest

from hicache.actions import (
    CopyPage,
    Fetch,
    Grant,
    HitTokens,
    Load,
    Probe,
    Revoke,
    Wait,
)
from hicache.events import Flushed
from tests.planner_config import config, words
from tests.planner_scenes import PROMPT, l2_world
from tests.planner_world import World

# ---------------------------------------------------------------- hits


def test_a_prefix_in_l1_is_granted_without_a_copy() -> None:
    world = World(config())
    world.run(PROMPT)

    request = world.start([*PROMPT, 50, 51])

    assert request.hit == HitTokens(device=8)
    assert world.done(Load) == world.done(CopyPage) == 0


def test_a_prefix_in_l2_is_loaded() -> None:
    world = l2_world()

    request = world.start(PROMPT)

    assert request.hit == HitTokens(host=8)
    assert world.count("loaded") == 4
    assert world.where(PROMPT) == ["12"] * 4


def test_a_prefix_in_l3_is_fetched_then_loaded() -> None:
    world = World(config())
    world.run(PROMPT)
    world.send(Flushed())
    assert world.where(PROMPT) == ["3"] * 4

    request = world.start(PROMPT)

    assert request.hit == HitTokens(storage=8)
    assert world.where(PROMPT) == ["123"] * 4


def test_a_hit_is_split_by_the_tier_where_its_pages_were_on_arrival() -> None:
    world = World(config(device_pages=8))
    world.run(words(0, 12))
    world.send(Flushed())
    world.run(words(0, 9))  # fetched: four pages in L1 and L2, two in L3
    world.run(words(100, 12))  # pushes two of them out of L1
    assert world.where(words(0, 12)) == ["123", "123", "23", "23", "3", "3"]

    request = world.start(words(0, 13))

    assert request.hit == HitTokens(device=4, host=4, storage=4)


def test_slots_are_granted_up_to_the_tokens_ahead_and_no_further_than_the_end() -> None:
    world = World(config())

    short = world.start(words(0, 9), ahead=3)
    whole = world.start(words(50, 9), ahead=1000)

    assert len(short.slots) == 2
    assert len(whole.slots) == 5


def test_a_prompt_of_less_than_a_page_and_an_empty_one_run_without_a_hit() -> None:
    world = World(config())

    for prompt in ([], [1]):
        request = world.start(prompt)
        assert request.hit.total == 0
        world.release(request)

    assert world.done(Probe) == 0
    assert world.planner.usage()["namespaces"] == 0


def test_a_request_that_joins_a_load_waits_for_it_and_loads_only_the_rest() -> None:
    world = l2_world()
    first = world.arrive(words(0, 5))
    world.want(first)
    (load,) = world.ops(Load)

    second = world.arrive(PROMPT)
    world.want(second)

    assert load in second.loads
    other = world.pending[world.ops(Load)[-1]]
    assert isinstance(other, Load)
    assert len(other.source) == 2
    world.settle()
    world.check()


# ---------------------------------------------------------------- partial hits


@pytest.mark.parametrize("tier", ["device", "host", "storage"])
def test_the_first_tokens_of_the_next_page_are_copied_from_any_tier(tier: str) -> None:
    world = World(config(page_size=4, device_pages=4))
    world.run(words(0, 8))
    if tier == "host":
        world.run(words(100, 16))
    elif tier == "storage":
        world.send(Flushed())

    request = world.start([*words(0, 7), 99, 98])

    assert request.hit.total == 7
    assert getattr(request.hit, tier) >= 3
    assert world.done(CopyPage) == 1
    assert world.done(Fetch) == (tier == "storage")


def test_a_page_fetched_for_its_first_tokens_alone_is_a_hit_in_storage() -> None:
    world = World(config(page_size=4))
    world.run(words(0, 4))
    world.send(Flushed())

    request = world.start([*words(0, 3), 99, 98])

    assert request.hit == HitTokens(storage=3)


def test_the_source_of_a_partial_hit_is_held_until_it_is_copied_and_not_leased() -> None:
    world = World(config(page_size=4, device_pages=5, host_pages=0))
    world.run(words(0, 8))
    request = world.arrive([*words(0, 7), 99])
    world.want(request)

    (copy,) = world.ops(CopyPage)
    other = world.arrive(words(100, 12))
    blocked = world.want(other)
    world.finish(copy)

    assert isinstance(blocked, Wait)
    assert isinstance(world.want(other), Grant)
    assert world.where(words(0, 8)) == ["1", ""]


def test_a_copy_that_failed_takes_the_partial_hit_back() -> None:
    world = World(config(page_size=4))
    world.run(words(0, 8))
    request = world.arrive([*words(0, 7), 99])
    world.want(request)

    world.fail(world.ops(CopyPage)[0])

    assert (request.num_revoked, request.num_computed, len(request.slots)) == (1, 4, 1)
    assert world.compute(request, 4)
    world.check_empty()


def test_a_slot_that_is_being_copied_to_is_free_only_when_the_copy_has_ended() -> None:
    world = World(config(page_size=4, device_pages=4, host_pages=0))
    world.run(words(0, 8))
    request = world.arrive([*words(0, 7), 99])
    world.want(request)

    world.release(request)

    assert world.planner.usage()["device"] == 3
    world.settle()
    assert world.planner.usage()["device"] == 2


def test_a_copy_for_a_request_that_is_gone_may_fail() -> None:
    world = World(config(page_size=4))
    world.run(words(0, 8))
    request = world.arrive([*words(0, 7), 99])
    world.want(request)
    world.release(request)

    world.fail(world.ops(CopyPage)[0])

    assert world.done(Revoke) == 0
    world.check_empty()
