"""Prefetch: what is asked of storage, what lands, and what is left behind."""

import pytest

from hicache.actions import Fetch, Grant, HitTokens, Probe, Store, Wait
from hicache.events import (
    ChainFound,
    Flushed,
    StorageUp,
)
from hicache.keys import pack
from hicache.prefetch import WaitComplete
from tests.planner_config import config, words
from tests.planner_scenes import PROMPT, l3_world, restarted
from tests.planner_world import NAMESPACE, World

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


def test_pages_that_have_landed_stay_for_the_request_that_waits_for_them() -> None:
    world = l3_world(host_pages=8)
    request = world.arrive(PROMPT)
    world.settle()
    assert world.where(PROMPT) == ["23"] * 4

    world.run(words(200, 16))
    assert world.where(PROMPT) == ["23"] * 4
    world.release(request)
    world.run(words(300, 16))

    assert "2" not in "".join(world.where(PROMPT))


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
