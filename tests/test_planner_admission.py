"""Admission to L3 at the second use: which pages are stored when, and who counts as a user."""

from collections.abc import Sequence
from typing import Unpack

import pytest

from hicache.actions import BackUp, Store
from hicache.events import Flushed, Synced
from tests.planner_config import Settings, config, words
from tests.planner_scenes import restarted
from tests.planner_world import NAMESPACE, World

PROMPT = words(0, 9)
"""Four pages of two tokens, and one more."""
LONGER = [*PROMPT, *words(50, 4)]


def choosy(**settings: Unpack[Settings]) -> World:
    """Return a world whose L3 takes a page at its second use."""
    return World(config(settings, admission="second"))


def stored(world: World) -> set[bytes]:
    return world.pools.storage


def keys(world: World, tokens: Sequence[int] = PROMPT) -> set[bytes]:
    return set(world.keys_of(NAMESPACE, tokens))


def test_a_page_of_one_request_stays_in_l2() -> None:
    world = choosy()

    world.run(PROMPT, num_new=4)

    assert world.where(PROMPT) == ["12"] * 4
    assert stored(world) == set()


def test_the_chunks_of_one_request_are_one_use() -> None:
    world = choosy()
    request = world.start(PROMPT)
    for _ in range(3):
        world.compute(request, 3)
        world.settle()

    world.release(request)
    world.settle()

    assert stored(world) == set()


def test_the_second_request_brings_what_both_use_to_l3_and_no_more() -> None:
    world = choosy()
    world.run(PROMPT)

    world.run(LONGER)

    assert stored(world) == keys(world, PROMPT[:8])
    assert world.where(LONGER) == ["123"] * 4 + ["12"] * 2


def test_two_requests_that_compute_the_same_pages_at_once_are_two_users() -> None:
    world = choosy()
    first, second = world.start(PROMPT), world.start(PROMPT)
    world.compute(first, 9)
    world.settle()
    assert stored(world) == set()

    world.compute(second, 9)
    world.settle()

    assert stored(world) == keys(world)


def test_a_preempted_request_that_comes_again_is_no_second_user() -> None:
    world = choosy()
    first = world.run(PROMPT)

    again = world.arrive(PROMPT, continues=first.id)
    world.settle()
    world.want(again)
    world.compute(again, 1)
    world.release(again)
    once_more = world.arrive(PROMPT, continues=first.id)
    world.settle()
    world.want(once_more)
    world.settle()
    assert stored(world) == set()
    world.release(once_more)
    world.run(PROMPT)

    assert stored(world) == keys(world)


def test_a_preempted_request_is_no_second_user_of_pages_that_were_evicted_meanwhile() -> None:
    world = choosy()
    first = world.run(PROMPT)
    world.send(Flushed())

    again = world.arrive(PROMPT, continues=first.id)
    world.settle()
    world.want(again)
    world.compute(again, 9)
    world.settle()

    assert world.where(PROMPT) == ["12"] * 4
    assert stored(world) == set()


def test_a_preempted_request_is_no_second_user_for_the_selective_write_policy() -> None:
    world = World(config(write="write_through_selective"))
    first = world.run(PROMPT)

    again = world.arrive(PROMPT, continues=first.id)
    world.want(again)
    world.settle()

    assert world.where(PROMPT) == ["1"] * 4


def test_pages_that_were_evicted_in_between_are_remembered_and_only_those_are_stored() -> None:
    world = choosy()
    world.run(PROMPT)
    world.send(Flushed())
    assert world.where(PROMPT) == [""] * 4

    world.run(LONGER)

    assert stored(world) == keys(world)
    assert world.where(LONGER) == ["123"] * 4 + ["12"] * 2


def test_what_is_remembered_of_pages_is_found_chunk_by_chunk() -> None:
    world = choosy()
    world.run(PROMPT)
    world.send(Flushed())
    request = world.start(PROMPT[:1])

    request.tokens[:] = PROMPT
    for _ in range(4):
        world.compute(request, 2)
        world.settle()

    assert stored(world) == keys(world)


def test_an_ancestor_that_is_not_remembered_is_used_by_whoever_used_what_is_below() -> None:
    world = choosy(num_ghosts=2)
    world.run(PROMPT)
    world.send(Flushed())
    request = world.start(PROMPT)

    world.compute(request, 4)
    world.settle()
    assert stored(world) == set()
    world.compute(request, 5)
    world.settle()

    assert stored(world) == keys(world)


def test_without_ghosts_uses_count_as_long_as_the_page_is_in_l1_or_l2() -> None:
    world = choosy(num_ghosts=0)
    world.run(PROMPT)
    world.send(Flushed())

    world.run(PROMPT)
    assert stored(world) == set()
    world.run(PROMPT)

    assert stored(world) == keys(world)


def test_neighbours_of_which_one_is_taken_by_l3_are_not_joined() -> None:
    world = choosy()
    world.run(LONGER)

    world.run(PROMPT)
    world.settle()

    assert [node.users for node in world.planner.nodes(NAMESPACE)] == [2, 1]
    assert stored(world) == keys(world)
    world.run(LONGER)
    assert stored(world) == keys(world, LONGER)


def test_a_sync_and_a_flush_store_nothing_that_l3_does_not_take() -> None:
    world = choosy(write="write_back")
    world.run(PROMPT)
    world.run(words(100, 5))
    world.run(words(100, 5))

    world.send(Synced())
    world.settle()

    assert world.planner.is_written
    assert world.where(PROMPT) == ["12"] * 4
    assert stored(world) == keys(world, words(100, 5))


def test_under_write_back_a_demoted_page_is_stored_at_its_second_use() -> None:
    world = choosy(write="write_back", device_pages=6)
    world.run(PROMPT)
    world.run(words(100, 12))
    assert world.where(PROMPT) == ["2"] * 4
    assert stored(world) == set()

    world.run(PROMPT)

    assert stored(world) >= keys(world)


def test_nothing_is_stored_early_without_l2() -> None:
    world = choosy(host_pages=0)

    world.run(PROMPT)
    world.run(PROMPT)

    assert world.done(BackUp) == world.done(Store) == 0


def test_a_miss_of_a_page_that_l3_did_not_take_says_so() -> None:
    world = choosy(device_pages=6, host_pages=4)
    world.run(PROMPT)
    world.run(words(100, 12))
    world.run(words(200, 12))

    request = world.start(PROMPT)

    assert [reason for reason, _ in world.why(request)] == ["not_admitted"]


@pytest.mark.parametrize("write", ["write_through", "write_through_selective"])
def test_pages_found_in_l3_after_a_restart_are_hit_and_not_written_again(write: str) -> None:
    world = choosy(write=write)
    world.run(PROMPT)
    world.run(PROMPT)
    fresh = restarted(world)

    request = fresh.run(PROMPT)

    assert request.hit.storage == 8
    assert fresh.done(Store) == 0
