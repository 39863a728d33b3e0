"""Loads that fail, and loads that are not worth their time."""

import pytest

from hicache.actions import CopyPage, HitTokens, Load, Revoke, Store
from hicache.events import Measured, StorageDown, StorageUp
from tests.planner_config import config, words
from tests.planner_scenes import PROMPT, l2_world
from tests.planner_world import World

# ---------------------------------------------------------------- failed loads


def test_a_failed_load_is_computed_and_nothing_of_it_is_in_l1() -> None:
    world = l2_world()
    request = world.arrive(PROMPT)
    world.want(request)

    world.finish(world.ops(Load)[0], [True, False, True, True])

    assert request.num_revoked == 1
    assert (request.num_computed, len(request.slots)) == (2, 1)
    assert world.where(PROMPT) == ["12", "2", "2", "2"]
    assert world.count("loaded") == 1
    assert world.count("failed", "load") == 3
    assert world.compute(request, 7)
    assert world.where(PROMPT) == ["12"] * 4
    world.check_empty()


def test_a_request_waits_for_the_load_of_pages_that_are_being_stored_too_and_for_that_only() -> (
    None
):
    world = World(config(device_pages=6))
    world.send(StorageDown())
    world.run(PROMPT)
    world.run(words(100, 12))
    world.send(StorageUp())
    first, second = world.arrive(PROMPT), world.arrive(PROMPT)
    world.want(first)
    (load,), (store,) = world.ops(Load), world.ops(Store)

    world.want(second)

    assert second.loads == {load}
    world.finish(store)
    world.finish(load)
    assert world.where(PROMPT) == ["123"] * 4
    world.check_empty()


def test_a_load_that_fails_from_its_first_page_on_leaves_nothing() -> None:
    world = l2_world()
    request = world.arrive(PROMPT)
    world.want(request)

    world.fail(world.ops(Load)[0])

    assert (request.num_computed, len(request.slots)) == (0, 0)
    assert world.where(PROMPT) == ["2"] * 4


def test_a_failed_load_fails_what_others_load_below_it() -> None:
    world = l2_world()
    first = world.arrive(words(0, 5))
    world.want(first)
    second = world.arrive(PROMPT)
    world.want(second)
    upper, lower = world.ops(Load)

    world.fail(upper)
    assert (first.num_revoked, second.num_revoked) == (1, 1)
    assert second.num_computed == 0
    assert world.planner.usage()["device"] == 2  # the other load still writes there
    world.finish(lower)

    assert world.planner.usage()["device"] == 0
    assert world.where(PROMPT) == ["2"] * 4
    world.check_empty()


@pytest.mark.parametrize("is_good", [True, False])
def test_a_load_counts_only_when_the_one_above_it_has_ended(is_good: bool) -> None:
    world = l2_world()
    first = world.arrive(words(0, 5))
    world.want(first)
    second = world.arrive(PROMPT)
    world.want(second)
    upper, lower = world.ops(Load)

    world.finish(lower)
    third = world.arrive(PROMPT)
    world.want(third, 0)
    assert third.loads == {upper}
    world.finish(upper, [is_good, is_good])

    assert world.where(PROMPT) == (["12"] * 4 if is_good else ["2"] * 4)
    assert {r.num_revoked for r in (first, second, third)} == {0 if is_good else 1}
    world.check_empty()


def test_a_failed_load_for_a_request_that_is_gone_revokes_nobody() -> None:
    world = l2_world()
    request = world.arrive(PROMPT)
    world.want(request)
    world.release(request)

    world.fail(world.ops(Load)[0])

    assert world.done(Revoke) == 0
    world.check_empty()


def test_a_partial_copy_behind_a_failed_load_is_given_up_with_it() -> None:
    world = World(config(page_size=4, device_pages=4, has_storage=False))
    world.run(words(0, 8))
    world.run(words(100, 16))
    request = world.arrive([*words(0, 7), 99])
    world.want(request)
    (load,), (copy,) = world.ops(Load), world.ops(CopyPage)

    world.fail(load)
    world.fail(copy)

    assert request.num_revoked == 1
    assert world.compute(request, 8)
    world.check_empty()


# ---------------------------------------------------------------- load or recompute


def test_pages_that_are_sooner_computed_are_not_loaded_until_the_link_is_tried_again() -> None:
    world = l2_world()
    world.step_s = 5.0
    world.start(words(0, 3))  # a load of one page takes five seconds or more
    world.step_s = 1.0
    world.send(Measured(10, 1.0))

    slow = world.start(PROMPT)
    assert slow.hit == HitTokens(device=2)
    assert ("recompute_cheaper", 3) in world.why(slow)
    world.release(slow)
    num_passed_over = 0
    while (request := world.start(PROMPT)).hit.host == 0:
        world.release(request)
        num_passed_over += 1

    assert 0 < num_passed_over < 20
