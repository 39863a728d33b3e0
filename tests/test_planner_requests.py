"""What a request is given, when it must wait, and what it gives back."""

from typing import Unpack

import pytest

from hicache.actions import (
    CopyPage,
    Fetch,
    Grant,
    Grown,
    HitTokens,
    Load,
    Preempt,
    Probe,
    Refuse,
    Revoke,
    Touch,
    Wait,
)
from hicache.events import Arrived, Flushed, Measured, Released, RequestId, StorageDown
from hicache.keys import pack
from tests.planner_config import Settings, config, words
from tests.planner_world import NAMESPACE, OTHER_NAMESPACE, World

PROMPT = words(0, 9)
"""Four pages of two tokens, and one more."""


def l2_world(**settings: Unpack[Settings]) -> World:
    """Return a world in which the pages of PROMPT are in L2 only."""
    world = World(config(settings, device_pages=6, has_storage=False))
    world.run(PROMPT)
    world.run(words(100, 12))
    assert world.where(PROMPT) == ["2"] * 4
    return world


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


# ---------------------------------------------------------------- room


def test_a_prompt_that_is_longer_than_l1_is_refused() -> None:
    world = World(config(device_pages=4))

    answer = world.want(world.arrive(words(0, 9)))

    assert isinstance(answer, Refuse)
    assert "needs 5 pages, L1 has 4" in answer.reason
    assert world.count("refused") == 5


def test_a_request_waits_while_others_have_all_of_l1() -> None:
    world = World(config(device_pages=4, host_pages=0))
    world.start(words(0, 8))

    answer = world.want(world.arrive(words(100, 2)))

    assert isinstance(answer, Wait)
    assert answer.reason == "device_full"


def test_a_request_waits_while_pages_are_demoted_for_it() -> None:
    world = World(config(device_pages=4, write="write_back"))
    world.run(words(0, 8))
    request = world.arrive(words(100, 2))

    answer = world.want(request)

    assert isinstance(answer, Wait)
    assert answer.reason == "demoting"
    world.settle()
    assert isinstance(world.want(request), Grant)


def test_a_request_that_decodes_gets_more_slots() -> None:
    world = World(config())
    request = world.start(words(0, 4))

    grown = world.extend(request, 4)
    again = world.extend(request, 4)

    assert isinstance(grown, Grown)
    assert isinstance(again, Grown)
    assert (len(grown.slots), len(again.slots), len(request.slots)) == (2, 0, 4)


def test_when_l1_runs_out_the_last_of_the_least_important_is_preempted_once() -> None:
    world = World(config(device_pages=4, host_pages=0))
    important = world.arrive(words(0, 2), priority=1)
    world.want(important)
    first = world.start(words(100, 2))
    last = world.start(words(200, 4))

    answers = [world.extend(important, 2), world.extend(important, 2)]

    assert all(isinstance(answer, Wait) for answer in answers)
    assert world.preempted == [last.id]
    world.release(last)
    assert isinstance(world.extend(important, 2), Grown)
    assert first.is_granted


def test_more_are_preempted_while_what_was_promised_is_not_enough() -> None:
    world = World(config(device_pages=4, host_pages=0))
    first, second, third = (world.start(words(first, 2)) for first in (0, 100, 200))
    world.extend(second, 2)

    world.extend(first, 4)
    world.extend(first, 4)
    world.extend(first, 4)
    world.extend(first, 4)

    assert world.preempted == [third.id, second.id]
    assert not first.num_revoked


def test_a_request_alone_that_outgrows_l1_is_refused() -> None:
    world = World(config(device_pages=4, host_pages=0))
    request = world.start(words(0, 8))

    assert isinstance(world.extend(request, 5), Refuse)
    assert world.done(Preempt) == 0


def test_a_request_alone_waits_for_what_a_released_one_is_still_loading() -> None:
    world = l2_world()
    gone = world.arrive(PROMPT)
    world.want(gone)
    request = world.arrive(words(200, 2))
    world.want(request)
    world.release(gone)

    early = world.extend(request, 4)
    world.settle()

    assert isinstance(early, Wait)
    assert world.done(Preempt) == 0
    assert isinstance(world.extend(request, 4), Grown)


def test_a_request_alone_waits_for_demotions() -> None:
    world = World(config(device_pages=4, write="write_back"))
    world.run(words(0, 6))
    request = world.start(words(100, 2))

    answer = world.extend(request, 4)

    assert isinstance(answer, Wait)
    assert answer.reason == "demoting"


# ---------------------------------------------------------------- committing


def test_pages_of_a_running_request_can_be_used_by_another_at_once() -> None:
    world = World(config())
    first = world.start(words(0, 8))
    world.compute(first, 4)

    second = world.start(words(0, 8))

    assert second.hit == HitTokens(device=4)


def test_a_copy_in_l1_is_never_replaced_and_the_duplicate_is_freed_at_release() -> None:
    world = World(config(host_pages=0))
    first, second = world.start(words(0, 8)), world.start(words(0, 8))
    world.compute(first, 8)
    used = world.planner.usage()["device"]

    world.compute(second, 8)
    assert world.planner.usage()["device"] == used
    world.release(second)

    assert world.planner.usage()["device"] == used - 4
    world.check()


def test_a_computed_page_becomes_the_l1_copy_of_one_that_is_in_l2_only() -> None:
    world = l2_world()
    request = world.arrive(words(0, 3))
    world.want(request)
    world.settle()
    world.send(Measured(1000, 0.001))
    slow = world.arrive(PROMPT)
    world.want(slow)
    assert slow.hit == HitTokens(device=2)

    world.compute(slow, 6)

    assert world.where(PROMPT) == ["12"] * 4
    world.check()


def test_pages_behind_a_copy_on_its_way_wait_and_enter_when_it_is_there() -> None:
    world = World(config(has_storage=False))
    computing = world.start(words(0, 8))
    world.run(PROMPT)
    world.run(words(100, 16))
    assert world.where(PROMPT) == ["2"] * 4
    loading = world.arrive(PROMPT)
    world.want(loading)

    world.compute(computing, 8)
    assert world.where(PROMPT) == ["2"] * 4
    world.settle()
    world.compute(computing, 2)
    world.settle()

    assert world.where(computing.tokens) == ["12"] * 5
    world.check_empty()


def test_pages_that_still_wait_for_a_copy_are_freed_at_release() -> None:
    world = World(config(has_storage=False))
    computing = world.start(words(0, 10))
    world.run(PROMPT)
    world.run(words(100, 14))
    loading = world.arrive(PROMPT)
    world.want(loading)
    world.compute(computing, 10)

    world.release(computing)

    world.settle()
    assert world.where(words(0, 10)) == ["12"] * 4 + [""]
    world.check_empty()


def test_committing_in_steps_keeps_one_node_and_joins_all_at_release() -> None:
    world = World(config(page_size=1, device_pages=200, host_pages=0))
    request = world.start(words(0, 150))
    for _ in range(150):
        world.compute(request, 1)

    running = len(world.planner.nodes(NAMESPACE))
    world.release(request)

    assert running == 3
    assert len(world.planner.nodes(NAMESPACE)) == 1


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
    world.finish(lower)

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


# ---------------------------------------------------------------- ending


def test_release_is_harmless_for_a_request_that_is_not_there() -> None:
    world = World(config())

    assert world.send(Released(RequestId(77))) == []


def test_cancel_and_retry_of_requests_that_share_a_prefix_corrupts_neither() -> None:
    world = World(config(device_pages=8))
    world.run(PROMPT)
    world.send(Flushed())
    other = world.arrive([*PROMPT[:8], 70, 71, 72])

    for _ in range(5):
        cancelled = world.arrive(PROMPT)
        world.want(cancelled)
        world.release(cancelled)
        world.check()
    retry = world.arrive(PROMPT)
    world.settle()

    for request in (other, retry):
        assert isinstance(world.want(request), Grant)
        assert request.hit.total == 8
    world.settle()
    world.check()
    world.check_empty()


def test_ten_thousand_tenants_come_and_go_and_leave_no_tree() -> None:
    world = World(config(device_pages=2, host_pages=0))
    planner = world.planner

    for tenant in range(10_000):
        namespace = type(NAMESPACE)(tenant.to_bytes(32, "little"))
        request = RequestId(tenant)
        planner.handle(Arrived(request, namespace, pack([1, 2]), 1), world.now)
        planner.handle(Released(request), world.now)

    assert planner.usage()["namespaces"] == 0


def test_a_tree_is_dropped_with_its_last_page() -> None:
    world = World(config(device_pages=4, host_pages=0))
    world.run(words(0, 8), OTHER_NAMESPACE)

    world.run(words(0, 8))

    assert world.planner.usage()["namespaces"] == 1
    assert world.where(words(0, 8), OTHER_NAMESPACE) == [""] * 4


def test_namespaces_never_share_a_node_or_a_record() -> None:
    world = World(config())
    world.run(PROMPT)

    request = world.start(PROMPT, OTHER_NAMESPACE)

    assert request.hit.total == 0
    assert world.done(Fetch) == 0


def test_the_tree_is_as_shallow_after_many_evictions_and_reloads_as_when_fresh() -> None:
    world = World(config(device_pages=10, host_pages=12, batch_pages=2))
    for turn in range(60):
        world.run(words(0, 5 + 2 * (turn % 7)))
        world.run(words(100, 4 + turn % 9))
    world.run(words(0, 17))

    assert world.count("demoted") + world.count("evicted") > 100
    assert len(world.planner.nodes(NAMESPACE)) <= 4
    world.check_empty()


# ---------------------------------------------------------------- use


def test_a_use_in_any_tier_is_a_use_in_l3_once_a_minute() -> None:
    world = World(config())
    world.run(PROMPT)

    for _ in range(100):
        world.release(world.start(PROMPT))

    touches = [action for action in world.log if isinstance(action, Touch)]
    assert 2 <= len(touches) <= 8
    assert set(touches[0].keys) == set(world.keys_of(NAMESPACE, PROMPT))


def test_storage_that_is_down_is_told_of_uses_when_it_is_up_again() -> None:
    world = World(config())
    world.run(PROMPT)
    world.send(StorageDown())

    world.release(world.start(PROMPT))

    assert world.done(Touch) == 0
