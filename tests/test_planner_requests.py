"""What a request is given, when it must wait, and what it gives back."""

from hicache.actions import (
    Fetch,
    Grant,
    Grown,
    HitTokens,
    Preempt,
    Refuse,
    Touch,
    Wait,
)
from hicache.events import Arrived, Flushed, Measured, Released, RequestId, StorageDown
from hicache.keys import pack
from tests.planner_config import config, words
from tests.planner_scenes import PROMPT, l2_world
from tests.planner_world import NAMESPACE, OTHER_NAMESPACE, World

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


def test_pages_that_waited_for_a_copy_enter_at_release_at_the_latest() -> None:
    world = World(config(has_storage=False))
    computing = world.start(words(0, 10))
    world.run(PROMPT)
    world.run(words(100, 14))
    loading = world.arrive(PROMPT)
    world.want(loading)
    world.compute(computing, 10)
    world.settle()

    world.release(computing)

    assert world.where(words(0, 10)) == ["12"] * 4 + ["1"]
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
