"""What has broken in systems like this: splits under copies, slots used too early, pins kept."""

import pytest

from hicache.actions import BackUp, CopyPage, Fetch, Grant, HitTokens, Load, Probe, Store, Wait
from hicache.events import ChainFound, Flushed
from hicache.keys import pack
from hicache.prefetch import BestEffort, WaitComplete
from tests.planner_config import config, words
from tests.planner_world import NAMESPACE, World

PROMPT = words(0, 9)
FORKS = [*words(0, 4), *words(50, 5)]
"""Shares two pages with PROMPT, so that the node of PROMPT is cut in its middle."""


def fork(world: World) -> None:
    """Let a request cut the node of PROMPT, wherever its pages are."""
    request = world.arrive(FORKS)
    if isinstance(world.want(request), Grant) and not request.loads & world.pending.keys():
        world.compute(request, 9 - request.num_computed)
    world.check()


# ---------------------------------------------------------------- split hands over


@pytest.mark.parametrize("outcomes", [[True] * 4, [True, True, True, False], [False] * 4])
def test_a_split_under_a_back_up_hands_it_to_both_halves(outcomes: list[bool]) -> None:
    world = World(config(has_storage=False))
    request = world.start(PROMPT)
    world.compute(request, 9)
    world.release(request)
    (back_up,) = world.ops(BackUp)

    fork(world)
    world.finish(back_up, outcomes)
    world.check()

    assert world.where(PROMPT) == ["12" if good else "1" for good in outcomes]
    world.check_empty()


@pytest.mark.parametrize("outcomes", [[True] * 4, [True, True, False, True], [False] * 4])
def test_a_split_under_a_store_hands_it_to_both_halves(outcomes: list[bool]) -> None:
    world = World(config())
    request = world.start(PROMPT)
    world.compute(request, 9)
    world.finish(world.ops(BackUp)[0])
    world.release(request)
    (store,) = world.ops(Store)

    fork(world)
    world.finish(store, outcomes)
    world.check()

    stored = outcomes.index(False) if False in outcomes else 4
    assert [("3" in tiers) for tiers in world.where(PROMPT)] == [i < stored for i in range(4)]
    world.check_empty()


@pytest.mark.parametrize("outcomes", [[True] * 4, [True, True, True, False], [False] * 4])
def test_a_split_under_a_load_hands_it_to_both_halves(outcomes: list[bool]) -> None:
    world = World(config(device_pages=12, has_storage=False))
    world.run(PROMPT)
    world.run(words(100, 24))
    world.want(world.arrive(PROMPT))
    (load,) = world.ops(Load)

    fork(world)
    world.finish(load, outcomes)
    world.check()

    arrived = outcomes.index(False) if False in outcomes else 4
    assert world.where(PROMPT) == ["12" if i < arrived else "2" for i in range(4)]
    world.check_empty()


@pytest.mark.parametrize("outcomes", [[True] * 4, [True, True, True, False], [False] * 4])
def test_a_split_under_a_fetch_hands_it_to_both_halves(outcomes: list[bool]) -> None:
    world = World(config(prefetch=WaitComplete()))
    world.run(PROMPT)
    world.send(Flushed())
    world.arrive(PROMPT)
    (fetch,) = world.ops(Fetch)

    keys = tuple(world.keys_of(NAMESPACE, FORKS))
    world.send(ChainFound(NAMESPACE, pack(FORKS[:8]), keys))
    assert len(world.planner.nodes(NAMESPACE)) == 3
    world.check()
    world.finish(fetch, outcomes)
    world.check()

    landed = outcomes.index(False) if False in outcomes else 4
    assert world.where(PROMPT)[:landed] == ["23"] * landed
    world.check_empty()


def test_a_split_under_a_partial_copy_keeps_its_source_held() -> None:
    world = World(config(page_size=4, device_pages=6, host_pages=0))
    world.run(words(0, 12))
    copying = world.arrive([*words(0, 11), 99])
    world.want(copying)

    cutting = world.arrive([*words(0, 4), *words(50, 4)])
    world.want(cutting, 0)
    world.check()
    world.settle()

    world.check_empty()


def test_a_half_that_has_no_copy_to_hold_may_leave_under_the_operation() -> None:
    world = World(config(device_pages=6, host_pages=3, page_size=1))
    request = world.start(words(0, 3))
    world.compute(request, 3)
    world.finish(world.ops(BackUp)[0])
    world.compute(request, 1)  # the node grows while its first pages are being stored
    world.release(request)
    (store,) = world.ops(Store)

    cutting, other = world.arrive([*words(0, 3), 77]), world.arrive(words(100, 3))
    for probe in world.ops(Probe):
        world.finish(probe)
    world.want(cutting, 0)
    assert isinstance(world.want(other), Grant)
    world.check()
    world.finish(store)

    assert world.where(words(0, 4)) == ["123"] * 3 + [""]
    world.check_empty()


# ---------------------------------------------------------------- nothing is used too early


def test_l1_slots_are_not_used_again_while_they_are_copied_out_of() -> None:
    world = World(config(device_pages=4, has_storage=False))
    request = world.start(words(0, 8))
    world.compute(request, 8)
    world.release(request)

    other = world.arrive(words(100, 8))
    assert isinstance(world.want(other), Wait)
    world.finish(world.ops(BackUp)[0])

    assert isinstance(world.want(other), Grant)


def test_host_pages_are_not_used_again_while_they_are_loaded_from() -> None:
    world = World(config(device_pages=8, has_storage=False))
    world.run(PROMPT)
    world.run(words(100, 16))
    request = world.arrive(PROMPT)
    world.want(request)
    (load,) = world.ops(Load)

    world.release(request)
    world.send(Flushed())
    assert world.planner.usage()["host"] == 4
    world.finish(load)
    world.send(Flushed())

    assert world.planner.usage()["host"] == 0


def test_host_pages_are_not_used_again_while_they_are_stored_from() -> None:
    world = World(config())
    request = world.start(PROMPT)
    world.compute(request, 9)
    world.finish(world.ops(BackUp)[0])
    world.release(request)
    (store,) = world.ops(Store)

    world.send(Flushed())
    assert world.planner.usage()["host"] == 4
    world.expire(store)
    world.send(Flushed())
    assert world.planner.usage()["host"] == 4
    world.come_back(store)
    world.send(Flushed())

    assert world.planner.usage()["host"] == 0


def test_a_load_never_evicts_its_own_source() -> None:
    world = World(config(device_pages=6, host_pages=6, write="write_back", has_storage=False))
    world.run(words(0, 8))
    world.run(words(100, 12))
    hit = [tiers for tiers in world.where(words(0, 8)) if tiers == "2"]
    assert hit

    request = world.arrive(words(0, 9))
    for _ in range(5):
        if isinstance(world.want(request), Grant):
            break
        assert world.where(words(0, 8)).count("2") == len(hit)
        world.settle()

    assert request.hit == HitTokens(host=2 * len(hit))
    world.check_empty()


def test_the_overlap_of_two_fetches_is_freed_once() -> None:
    world = World(config(prefetch=WaitComplete()))
    world.run(words(0, 13))
    world.send(Flushed())
    first, second = world.arrive(PROMPT), world.arrive(words(0, 13))

    world.release(first)
    world.release(second)
    world.settle()
    world.check()

    world.check_empty()


def test_ends_in_any_order_of_a_partial_copy_and_its_request() -> None:
    world = World(config(page_size=4, device_pages=6, host_pages=0))
    world.run(words(0, 8))
    for ends_first in (True, False):
        request = world.arrive([*words(0, 7), 99])
        world.want(request)
        (copy,) = world.ops(CopyPage)
        if ends_first:
            world.release(request)
            world.finish(copy)
        else:
            world.finish(copy)
            world.release(request)
        assert world.planner.usage()["device"] == 2


def test_tail_pages_outlive_the_request_that_fetched_them() -> None:
    """Nodes keep copies of small arrays, not slices of one big one that others still use."""
    world = World(config(prefetch=WaitComplete(), batch_pages=8))
    world.run(words(0, 17))
    world.send(Flushed())
    world.release(world.start(words(0, 17)))

    sizes = [len(node.host.slots) for node in world.planner.nodes(NAMESPACE)]
    usage = world.planner.usage()["host"]

    assert sum(sizes) == usage == 8


def test_pages_that_are_cut_off_while_they_are_stored_are_freed_when_that_ends() -> None:
    world = World(config(host_pages=6, prefetch=WaitComplete()))
    request = world.start(PROMPT)
    world.compute(request, 9)
    world.finish(world.ops(BackUp)[0])
    world.finish(world.ops(Store)[0], [True, True, False, False])
    world.release(request)
    world.run(FORKS)
    world.run(words(200, 8))
    assert world.where(PROMPT) == ["13", "13", "12", "12"]
    again = world.arrive(PROMPT)
    world.want(again)
    world.release(again)
    (store,) = world.ops(Store)
    world.send(Flushed())
    assert world.where(PROMPT) == ["3", "3", "2", "2"]

    world.arrive(PROMPT)
    world.fail(world.ops(Fetch)[0])
    assert world.where(PROMPT) == [""] * 4
    world.check()
    world.finish(store)

    assert world.planner.usage()["host"] == 0
    world.check_empty()


def test_a_probe_that_ends_when_its_path_has_gone_is_not_believed() -> None:
    world = World(config(write="write_back", prefetch=WaitComplete()))
    world.run(PROMPT)
    longer = [*PROMPT[:8], *words(50, 5)]
    world.pools.storage.update(world.keys_of(NAMESPACE, longer)[4:])
    request = world.arrive(longer)
    (probe,) = world.ops(Probe)

    world.send(Flushed())
    world.finish(probe)

    assert world.planner.nodes(NAMESPACE) == []
    assert isinstance(world.want(request), Grant)


def test_room_for_a_fetch_is_not_made_of_the_path_to_it() -> None:
    world = World(config(device_pages=4, host_pages=2, write="write_back", prefetch=WaitComplete()))
    world.run(words(0, 4))
    longer = [*words(0, 4), *words(50, 3)]
    world.pools.storage.add(world.keys_of(NAMESPACE, longer)[2])
    request, other = world.arrive(longer), world.arrive(words(100, 8))
    mine, its = world.ops(Probe)
    world.finish(its)
    assert isinstance(world.want(other), Wait)
    world.finish(world.ops(BackUp)[0])
    world.fail(world.ops(Store)[0])
    assert world.where(words(0, 4)) == ["2", "2"]

    world.finish(mine)

    assert world.where(longer) == ["2", "2", "3"]
    world.release(request)
    world.check_empty()


@pytest.mark.parametrize("how", ["probe", "scan"])
def test_pages_found_while_they_are_being_stored_are_left_to_their_store(how: str) -> None:
    world = World(config(prefetch=WaitComplete()))
    keys = world.keys_of(NAMESPACE, PROMPT)
    computing = world.start(PROMPT)
    asking = world.arrive(PROMPT)
    (probe,) = world.ops(Probe)
    world.compute(computing, 9)
    world.finish(world.ops(BackUp)[0])
    (store,) = world.ops(Store)

    world.pools.storage.update(keys)
    if how == "probe":
        world.finish(probe)
    else:
        world.send(ChainFound(NAMESPACE, pack(PROMPT[:8]), tuple(keys)))
    world.check()
    assert world.where(PROMPT) == ["12"] * 4
    world.fail(store)

    assert world.where(PROMPT) == ["12"] * 4
    world.release(asking)
    world.check_empty()


def test_a_page_in_l1_whose_copy_is_being_fetched_leaves_at_once() -> None:
    world = World(config(device_pages=6, prefetch=BestEffort()))
    world.run(PROMPT)
    world.send(Flushed())
    late = world.arrive(PROMPT)
    world.want(late)
    world.now += 1
    world.want(late)
    world.compute(late, 9)
    world.release(late)
    (fetch,) = world.ops(Fetch)

    other = world.arrive(words(100, 10))
    world.finish(world.ops(Probe)[0])

    assert isinstance(world.want(other), Grant)
    assert world.count("evicted", "busy") == 3
    world.finish(fetch)
    world.check_empty()


def test_a_failed_load_drops_all_nodes_that_another_load_brings_below_it() -> None:
    world = World(config(device_pages=20, host_pages=40, has_storage=False))
    world.run(words(0, 13))
    world.run([*words(0, 8), *words(50, 4)])
    world.run(words(100, 40))
    upper_request = world.arrive(words(0, 5))
    world.want(upper_request)
    lower_request = world.arrive(words(0, 13))
    world.want(lower_request)
    upper, lower = world.ops(Load)

    world.fail(upper)
    world.check()
    world.finish(lower)

    assert world.where(words(0, 13)) == ["2"] * 6
    assert lower_request.num_computed == 0
    world.check_empty()


def test_room_that_is_not_found_lets_go_of_the_source_of_a_partial_hit() -> None:
    world = World(config(page_size=4, device_pages=4, host_pages=0))
    world.run(words(0, 8))
    world.start(words(100, 8))
    request = world.arrive([*words(0, 7), *words(200, 4)])

    assert isinstance(world.want(request), Wait)

    assert world.planner.usage()["operations"] == 0
    world.check()
