"""Prefetch: what is asked of storage, how long a request waits, and what is left behind."""

from collections.abc import Sequence
from typing import Unpack

import pytest

from hicache.actions import Cancel, Fetch, Grant, HitTokens, Probe, Store, Wait
from hicache.events import (
    ChainFound,
    Finished,
    Flushed,
    Measured,
    Returned,
    StorageDown,
    StorageUp,
    Ticked,
)
from hicache.keys import pack
from hicache.prefetch import UNKNOWN_PATIENCE_S, BestEffort, PrefetchPolicy, Timeout, WaitComplete
from tests.planner_config import Settings, config, words
from tests.planner_world import NAMESPACE, World

PROMPT = words(0, 9)


def l3_world(
    policy: PrefetchPolicy | None = None,
    prompt: Sequence[int] = PROMPT,
    **settings: Unpack[Settings],
) -> World:
    """Return a world in which the pages of a prompt are in L3 only, and known to be there."""
    world = World(config(settings, prefetch=policy or WaitComplete()))
    world.run(prompt)
    world.send(Flushed())
    assert set(world.where(prompt)) == {"3"}
    return world


def restarted(world: World) -> World:
    """Return a new world over the same storage."""
    fresh = World(world.settings)
    fresh.pools.storage = world.pools.storage
    return fresh


# ---------------------------------------------------------------- what is asked for


def test_pages_that_the_tree_knows_are_not_probed() -> None:
    world = l3_world()
    probes = world.done(Probe)

    world.arrive(PROMPT)

    assert world.done(Probe) == probes
    assert len(world.ops(Fetch)) == 1


def test_after_a_restart_a_probe_finds_what_is_stored() -> None:
    world = restarted(l3_world())

    request = world.start(PROMPT)

    assert world.done(Probe) == 1
    assert request.hit == HitTokens(storage=8)


def test_only_hits_take_pages_of_l2() -> None:
    world = restarted(l3_world())
    asked = [*words(0, 8), *words(50, 9)]

    world.arrive(asked)
    assert world.planner.usage()["host"] == 0
    world.finish(world.ops(Probe)[0])

    (fetch,) = world.ops(Fetch)
    action = world.pending[fetch]
    assert isinstance(action, Fetch)
    assert len(action.target) == world.planner.usage()["host"] == 4


def test_a_page_that_storage_did_not_have_is_not_asked_for_again_for_a_while() -> None:
    world = World(config(miss_memory_s=10))
    for _ in range(3):
        world.release(world.start(PROMPT))
    assert world.done(Probe) == 1

    world.now += 10
    world.release(world.start(PROMPT))
    world.send(StorageUp())
    world.release(world.start(PROMPT))

    assert world.done(Probe) == 3


def test_the_keys_of_the_probe_are_those_of_the_pages_computed() -> None:
    world = World(config())

    world.run(PROMPT)

    (probe,) = [action for action in world.log if isinstance(action, Probe)]
    stored = [page.key for a in world.log if isinstance(a, Store) for page in a.pages]
    assert list(probe.keys) == stored


def test_a_probe_of_a_request_that_is_gone_brings_nothing() -> None:
    world = restarted(l3_world())
    request = world.arrive(PROMPT)
    (probe,) = world.ops(Probe)

    world.release(request)
    world.finish(probe)

    assert probe in world.cancelled
    assert world.done(Fetch) == 0
    assert world.planner.usage()["namespaces"] == 0


def test_two_requests_share_one_fetch() -> None:
    world = l3_world()
    first, second = world.arrive(PROMPT), world.arrive(PROMPT)
    fetches = world.ops(Fetch)

    world.release(first)
    assert world.cancelled.isdisjoint(fetches)
    assert isinstance(world.want(second), Wait)
    world.settle()

    assert len(fetches) == 1
    assert isinstance(world.want(second), Grant)
    assert second.hit == HitTokens(storage=8)


def test_a_fetch_that_nobody_waits_for_is_cancelled() -> None:
    world = l3_world()
    first, second = world.arrive(PROMPT), world.arrive(PROMPT)
    (fetch,) = world.ops(Fetch)

    world.release(first)
    world.release(second)

    assert fetch in world.cancelled
    world.check_empty()


def test_what_lands_of_a_cancelled_fetch_stays() -> None:
    world = l3_world()
    world.release(world.arrive(PROMPT))

    world.finish(world.ops(Fetch)[0], [True, True, False, False])

    assert world.where(PROMPT) == ["23", "23", "3", "3"]
    assert world.count("failed") == 0


def test_who_joins_a_cancelled_fetch_fetches_the_rest_again() -> None:
    world = l3_world()
    world.release(world.arrive(PROMPT))
    retry = world.arrive(PROMPT)
    (cancelled,) = world.ops(Fetch)

    world.finish(cancelled, [True, False, False, False])
    assert isinstance(world.want(retry), Wait)
    world.settle()

    assert isinstance(world.want(retry), Grant)
    assert retry.hit == HitTokens(storage=8)


# ---------------------------------------------------------------- holes


def test_a_page_behind_a_hole_is_freed_and_the_belief_in_the_hole_healed() -> None:
    world = l3_world()
    lost = world.keys_of(NAMESPACE, PROMPT)[1]
    world.pools.storage.discard(lost)

    request = world.start(PROMPT)

    assert request.hit == HitTokens(storage=2)
    assert world.where(PROMPT) == ["123", "", "", ""]
    assert world.planner.usage()["host"] == 1
    assert world.why(request) == [("evicted_from_storage", 3)]


def test_pages_behind_a_hole_are_used_as_soon_as_it_is_computed() -> None:
    world = l3_world()
    world.pools.storage.difference_update(world.keys_of(NAMESPACE, PROMPT)[:2])
    request = world.start(PROMPT)
    assert request.hit.total == 0

    world.compute(request, 4)
    world.settle()
    other = world.start(PROMPT)

    assert other.hit == HitTokens(device=4, storage=4)


def test_a_failed_read_heals_the_belief_in_a_page_that_is_in_l1_too() -> None:
    world = l3_world(batch_pages=1)
    world.pools.storage.clear()

    request = world.start(PROMPT)

    assert request.hit.total == 0
    assert world.where(PROMPT) == [""] * 4
    world.compute(request, 9)
    world.settle()
    assert world.where(PROMPT) == ["123"] * 4


# ---------------------------------------------------------------- no room


def test_a_fetch_that_found_no_room_is_retried_when_there_is_some() -> None:
    """Rate-limited once, it must not be forgotten."""
    world = l3_world(host_pages=4, batch_pages=2)
    request = world.arrive(PROMPT)
    assert len(world.ops(Fetch)) == 1

    world.finish(world.ops(Fetch)[0])
    assert len(world.ops(Fetch)) == 1
    world.finish(world.ops(Fetch)[0])

    assert isinstance(world.want(request), Grant)
    assert request.hit == HitTokens(storage=8)


def test_a_blocked_fetch_takes_what_room_there_is() -> None:
    world = l3_world(host_pages=8, batch_pages=8, device_pages=24)
    other = world.arrive(words(200, 15))
    world.settle()
    world.want(other)
    world.compute(other, 14)
    assert world.planner.usage()["host"] == 7

    request = world.arrive(PROMPT)
    world.finish(world.ops(Fetch)[0])

    assert world.where(PROMPT)[:2] == ["23", "3"]
    world.settle()
    assert isinstance(world.want(request), Grant)
    assert request.hit.total == 8


def test_blocked_fetches_are_retried_first_come_first_served() -> None:
    world = l3_world(host_pages=2, batch_pages=1, prompt=words(0, 5))
    first, second = world.arrive(words(0, 5)), world.arrive(words(0, 5))

    world.finish(world.ops(Fetch)[0])

    (fetch,) = world.ops(Fetch)
    world.finish(fetch)
    for request in (first, second):
        assert isinstance(world.want(request), Grant)
        assert request.hit.total == 4


def test_a_request_that_l2_has_no_room_for_does_not_wait_for_ever() -> None:
    world = World(config(host_pages=4, prefetch=WaitComplete()))
    world.run(words(0, 7))
    world.run(words(0, 13))
    world.send(Flushed())
    assert world.where(words(0, 13)) == ["3"] * 6
    request = world.arrive(words(0, 13))
    world.settle()

    answer = world.want(request)

    assert isinstance(answer, Grant)
    assert request.hit == HitTokens(storage=8)
    assert world.why(request) == [("no_room", 2)]


def test_a_fetch_that_hangs_keeps_its_pages_and_nobody_waiting() -> None:
    world = l3_world(host_pages=4, batch_pages=2)
    request = world.arrive(PROMPT)
    (fetch,) = world.ops(Fetch)

    world.expire(fetch)
    assert world.planner.usage()["host"] == 2
    assert isinstance(world.want(request), Grant)
    assert request.hit.total == 0
    world.check()
    world.come_back(fetch)

    assert world.planner.usage()["host"] == 0
    assert world.count("failed", "late") == 2


def test_a_blocked_request_does_not_wait_for_calls_that_hang() -> None:
    world = l3_world(host_pages=4, batch_pages=2)
    world.run(words(200, 9))
    world.send(Flushed())
    hanging, blocked = world.arrive(PROMPT), world.arrive(words(200, 9))
    world.expire(world.ops(Fetch)[0])

    assert isinstance(world.want(hanging), Grant)
    assert isinstance(world.want(blocked), Grant)
    world.check_empty()


# ---------------------------------------------------------------- a good one must still run


@pytest.mark.parametrize("how", ["aborted", "missed", "short", "failed", "late", "overdue"])
def test_after_100_prefetches_that_came_to_nothing_a_good_one_runs(how: str) -> None:
    world = l3_world(host_pages=8)
    keys = world.keys_of(NAMESPACE, PROMPT)
    for number in range(100):
        world.pools.storage.update(keys)
        world.send(ChainFound(NAMESPACE, pack(PROMPT[:8]), tuple(keys)))
        request = world.arrive([*PROMPT, 1000 + number] if how != "missed" else words(5000, 9))
        for op in world.ops(Fetch):
            if how == "short":
                world.finish(op, [True, False, True, True])
            elif how == "failed":
                world.fail(op)
            elif how == "overdue":
                world.expire(op)
                world.come_back(op)
        world.release(request)
        world.settle()
        world.send(Flushed())
        world.check()
    world.send(ChainFound(NAMESPACE, pack(PROMPT[:8]), tuple(keys)))

    request = world.start(PROMPT)

    assert request.hit == HitTokens(storage=8)
    world.check_empty()


def test_a_completed_span_of_no_pages_is_no_node() -> None:
    world = l3_world()
    request = world.arrive(PROMPT)

    world.fail(world.ops(Fetch)[0])

    assert world.planner.nodes(NAMESPACE) == []
    world.release(request)


# ---------------------------------------------------------------- how long to wait


def test_best_effort_waits_five_percent_of_what_computing_would_take() -> None:
    world = l3_world(BestEffort())
    world.step_s = 0.0
    world.send(Measured(10, 100.0))  # 8 tokens: 80 seconds
    request = world.arrive(PROMPT)
    assert isinstance(world.want(request), Wait)
    began = world.now

    world.now = began + 3.9
    assert isinstance(world.want(request), Wait)
    world.now = began + 4.0

    assert isinstance(world.want(request), Grant)
    assert world.why(request) == [("late", 4)]


def test_best_effort_waits_a_little_where_the_prefill_rate_is_unknown() -> None:
    world = l3_world(BestEffort())
    world.step_s = 0.0
    request = world.arrive(PROMPT)
    world.want(request)
    began = world.now

    world.now = began + UNKNOWN_PATIENCE_S / 2
    assert isinstance(world.want(request), Wait)
    world.now = began + UNKNOWN_PATIENCE_S

    assert isinstance(world.want(request), Grant)


def test_timeout_waits_a_base_and_an_amount_for_the_tokens() -> None:
    policy = Timeout(base_s=1.0, per_ki_token_s=2.0)

    assert policy.patience_s(2048, prefill_s=1e9) == 5.0


def test_wait_complete_waits_until_all_is_there() -> None:
    world = l3_world()
    request = world.arrive(PROMPT)
    for _ in range(100):
        assert isinstance(world.want(request), Wait)
        world.now += 1000
    assert world.planner.next_deadline() is None

    world.finish(world.ops(Fetch)[0])

    assert isinstance(world.want(request), Grant)
    assert request.hit == HitTokens(storage=8)


def test_the_planner_says_when_patience_ends_until_it_has() -> None:
    world = l3_world(Timeout(5.0, 0.0))
    world.step_s = 0.0
    assert world.planner.next_deadline() is None
    request = world.arrive(PROMPT)
    world.want(request)
    began = world.now
    assert world.planner.next_deadline() == began + 5.0

    world.now = began + 5.0
    world.send(Ticked())
    assert world.planner.next_deadline() is None

    assert isinstance(world.want(request), Grant)


def test_a_request_that_ends_has_no_deadline() -> None:
    world = l3_world(Timeout(5.0, 0.0))
    request = world.arrive(PROMPT)
    world.want(request)

    world.release(request)

    assert world.planner.next_deadline() is None


def test_what_a_prefetch_fetched_too_late_is_there_for_the_next_request() -> None:
    world = l3_world(BestEffort())
    late = world.arrive(PROMPT)
    world.want(late)
    world.now += 1
    assert isinstance(world.want(late), Grant)
    assert late.hit.total == 0
    world.release(late)

    world.settle()

    assert world.where(PROMPT) == ["23"] * 4
    assert world.start(PROMPT).hit == HitTokens(host=8)


def test_what_has_landed_when_patience_ends_is_used() -> None:
    world = l3_world(BestEffort(), batch_pages=2)
    request = world.arrive(PROMPT)
    world.want(request)
    world.finish(world.ops(Fetch)[0])
    world.now += 1

    assert isinstance(world.want(request), Grant)

    assert request.hit == HitTokens(storage=4)
    assert world.why(request) == [("late", 2)]


def test_a_request_whose_prefetch_is_pending_does_not_block_others() -> None:
    world = l3_world()
    waiting, other = world.arrive(PROMPT), world.arrive(words(300, 4))
    world.finish(world.ops(Probe)[0])

    assert isinstance(world.want(waiting), Wait)
    assert isinstance(world.want(other), Grant)


# ---------------------------------------------------------------- load or recompute


def test_pages_that_are_sooner_computed_are_not_fetched_until_the_link_is_tried_again() -> None:
    world = l3_world()
    slow = world.arrive(PROMPT)
    world.now += 50
    world.finish(world.ops(Fetch)[0])
    world.release(slow)
    world.send(Flushed())
    world.send(Measured(80, 80.0))

    request = world.start(PROMPT)
    assert request.hit.total == 0
    assert world.why(request) == [("recompute_cheaper", 4)]
    world.release(request)
    num_passed_over = 1
    while (request := world.start(PROMPT)).hit.total == 0:
        world.release(request)
        num_passed_over += 1

    assert num_passed_over < 20


# ---------------------------------------------------------------- storage that comes and goes


def test_while_storage_is_down_nothing_is_asked_of_it() -> None:
    world = l3_world()
    world.send(StorageDown())
    before = world.done(Probe) + world.done(Fetch)

    request = world.start([*PROMPT, *words(70, 8)])

    assert world.done(Probe) + world.done(Fetch) == before
    assert world.why(request)[0] == ("storage_down", 4)


def test_a_blocked_fetch_ends_when_storage_goes_down() -> None:
    world = l3_world(host_pages=4, batch_pages=2)
    request = world.arrive(PROMPT)

    world.send(StorageDown())
    world.fail(world.ops(Fetch)[0])

    assert isinstance(world.want(request), Grant)
    assert world.why(request)


def test_storage_that_does_not_exist_does_not_come_up() -> None:
    world = World(config(has_storage=False))

    world.send(StorageUp())
    world.run(PROMPT)

    assert world.done(Probe) == world.done(Store) == 0


def test_a_found_chain_rebuilds_the_tree() -> None:
    world = restarted(l3_world())
    keys = tuple(world.keys_of(NAMESPACE, PROMPT))

    world.send(ChainFound(NAMESPACE, pack(PROMPT[:4]), keys[:2]))
    world.send(ChainFound(NAMESPACE, pack(PROMPT[:8]), keys))
    world.check()

    assert world.where(PROMPT) == ["3"] * 4
    request = world.start(PROMPT)
    assert (request.hit, world.done(Probe)) == (HitTokens(storage=8), 0)


def test_a_found_chain_of_pages_that_are_at_hand_is_believed() -> None:
    world = World(config(write="write_back"))
    world.run(PROMPT)
    keys = tuple(world.keys_of(NAMESPACE, PROMPT))

    world.send(ChainFound(NAMESPACE, pack(PROMPT[:4]), keys[:2]))

    assert world.where(PROMPT) == ["13", "13", "1", "1"]
    world.check()


def test_overdue_pages_stay_lent_until_the_call_has_returned() -> None:
    world = l3_world(host_pages=4)
    request = world.arrive(PROMPT)
    (fetch,) = world.ops(Fetch)
    world.send(Finished(fetch, [False] * 2, is_returned=False))
    world.release(request)
    world.send(Flushed())

    assert world.planner.usage()["host"] == 2
    world.send(Returned(fetch))

    assert world.planner.usage()["host"] == 0
    assert world.done(Cancel) == 0
