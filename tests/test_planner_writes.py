"""Write policies: what is where after which event."""

from typing import Unpack

import pytest

from hicache.actions import BackUp, Store
from hicache.events import Flushed, StorageDown, StorageUp, Synced
from hicache.planner import PlannerConfig
from tests.planner_config import Settings, config, words
from tests.planner_world import NAMESPACE, World

PROMPT = words(0, 9)
EVERYWHERE = ["123"] * 4


def policy(name: str, **settings: Unpack[Settings]) -> PlannerConfig:
    return config(settings, write=name)


# ---------------------------------------------------------------- write_through


def test_write_through_writes_down_at_the_first_commit() -> None:
    world = World(policy("write_through"))
    request = world.start(PROMPT)

    world.compute(request, 4)

    assert world.where(PROMPT) == ["1", "1", "", ""]
    assert len(world.ops(BackUp)) == 1
    world.settle()
    assert world.where(PROMPT) == ["123", "123", "", ""]


def test_a_chunked_prompt_is_stored_whole() -> None:
    world = World(policy("write_through"))
    request = world.start(PROMPT)
    for _ in range(3):
        world.compute(request, 3)

    world.settle()

    assert world.where(PROMPT) == EVERYWHERE
    assert world.pools.storage == set(world.keys_of(NAMESPACE, PROMPT))


def test_pages_that_decoding_fills_are_written_down_too() -> None:
    world = World(policy("write_through"))

    request = world.run(PROMPT, num_new=5)

    assert world.where(request.tokens) == ["123"] * 7


def test_nothing_is_backed_up_without_l2() -> None:
    world = World(policy("write_through", host_pages=0))

    world.run(PROMPT)
    world.send(Synced())

    assert world.done(BackUp) == 0
    assert world.planner.is_written


def test_a_store_takes_as_many_pages_as_a_batch_has_and_the_next_goes_on() -> None:
    world = World(policy("write_through", batch_pages=3))

    world.run(words(0, 17))

    stores = [len(a.pages) for a in world.log if isinstance(a, Store)]
    assert sum(stores) == 8
    assert max(stores) == 3
    assert world.where(words(0, 17)) == ["123"] * 8


def test_a_failed_store_is_a_counted_drop_and_the_next_use_tries_again() -> None:
    world = World(policy("write_through"))
    request = world.start(PROMPT)
    world.compute(request, 9)
    world.finish(world.ops(BackUp)[0])

    world.finish(world.ops(Store)[0], [True, False, True, True])
    world.release(request)
    assert world.where(PROMPT) == ["123", "12", "12", "12"]
    assert world.count("failed", "store") == 3
    assert world.ops(Store) == []
    world.start(PROMPT)

    assert world.where(PROMPT) == EVERYWHERE


def test_a_failed_back_up_leaves_the_pages_in_l1_only_and_drops_only_what_waited_for_it() -> None:
    world = World(policy("write_through"))
    first, second = world.start(PROMPT), world.start(words(100, 5))
    world.compute(first, 9)
    world.compute(second, 5)
    one, other = world.ops(BackUp)

    world.fail(one)
    world.finish(other)
    world.settle()

    assert world.where(PROMPT) == ["1"] * 4
    assert world.where(words(100, 5)) == ["123"] * 2
    assert world.count("failed", "back_up") == 4


def test_a_write_waits_for_the_one_above_it_and_no_other() -> None:
    world = World(policy("write_through"))
    first, second = world.start(PROMPT), world.start(words(100, 5))
    world.compute(first, 4)
    world.compute(first, 5)
    world.compute(second, 5)
    above, other = world.ops(BackUp)

    world.fail(other)
    world.finish(above)
    world.settle()

    assert world.where(PROMPT) == EVERYWHERE
    assert world.where(words(100, 5)) == ["1"] * 2


def test_room_for_a_copy_is_not_made_of_its_ancestors() -> None:
    world = World(policy("write_through", host_pages=4))
    world.send(StorageDown())
    world.run(words(0, 4))
    assert world.where(words(0, 4)) == ["12", "12"]
    request = world.start([*words(0, 4), *words(50, 6)])

    world.send(StorageUp())
    world.compute(request, 6)
    world.settle()

    assert world.where(request.tokens)[:2] == ["123", "123"]
    assert world.count("dropped", "host_full") == 3


def test_pages_that_l2_has_no_room_for_are_dropped_and_counted() -> None:
    world = World(policy("write_through", host_pages=2))
    request = world.start(words(0, 8))

    world.compute(request, 8)

    assert world.count("dropped", "host_full") == 4
    assert world.where(words(0, 8)) == ["1"] * 4


# ---------------------------------------------------------------- write_through_selective


def test_selective_writes_at_the_second_distinct_request() -> None:
    world = World(policy("write_through_selective"))

    world.run(PROMPT)
    assert world.where(PROMPT) == ["1"] * 4
    world.run(PROMPT)

    assert world.where(PROMPT) == EVERYWHERE


def test_one_request_counts_once_however_many_chunks_it_has() -> None:
    world = World(policy("write_through_selective", device_pages=80))
    request = world.start(words(0, 140))

    for _ in range(14):
        world.compute(request, 10)
    world.release(request)
    world.settle()

    assert world.done(BackUp) == 0
    (node,) = world.planner.nodes(NAMESPACE)
    assert (node.users, node.uses) == (1, 1)


def test_selective_writes_only_what_both_requests_use() -> None:
    world = World(policy("write_through_selective"))
    world.run(PROMPT)

    world.run([*words(0, 4), *words(100, 5)])

    assert world.where(PROMPT) == ["123", "123", "1", "1"]


# ---------------------------------------------------------------- write_back


def test_write_back_writes_what_l1_evicts_and_nothing_before() -> None:
    world = World(policy("write_back", device_pages=6))
    world.run(PROMPT)
    assert world.where(PROMPT) == ["1"] * 4

    world.run(words(100, 10))

    assert world.where(PROMPT)[1:] == ["23"] * 3
    assert world.where(words(100, 10)) == ["1"] * 5


def test_write_back_stores_ancestors_before_or_with_descendants() -> None:
    """Else a lookup from the root finds nothing of a stored tail."""
    world = World(policy("write_back", device_pages=10, batch_pages=2))
    world.run(words(0, 17))

    world.run(words(100, 8))

    first_tail = world.where(words(0, 17))[-2:]
    assert first_tail == ["23", "23"]
    assert world.where(words(0, 17))[:6] == ["123"] * 6
    seen: set[bytes] = {NAMESPACE}
    for action in world.log:
        if isinstance(action, Store):
            for page in action.pages:
                assert page.parent in seen
                seen.add(page.key)


def test_a_demotion_without_a_host_page_drops_the_page_and_counts_it() -> None:
    world = World(policy("write_back", device_pages=4, host_pages=2))
    world.run(words(0, 8))

    request = world.start(words(100, 8))

    assert request.is_granted
    assert world.count("dropped", "host_full") > 0
    world.check_empty()


def test_a_low_water_mark_of_l1_is_kept_by_demoting_ahead_of_need() -> None:
    world = World(policy("write_back", device_pages=8, low_water_pages=3))

    world.run(words(0, 16))

    assert world.planner.usage()["device"] == 5
    assert world.count("demoted", "room") == 3
    assert world.where(words(0, 16)) == ["123"] * 5 + ["23"] * 3


def test_with_copies_in_l2_nothing_is_done_ahead_of_need() -> None:
    world = World(policy("write_through", device_pages=8, low_water_pages=3))

    world.run(words(0, 16))

    assert world.planner.usage()["device"] == 8


def test_pages_that_are_used_while_they_are_demoted_stay_in_l1() -> None:
    world = World(policy("write_back", device_pages=6))
    world.run(PROMPT)
    other, user = world.arrive(words(100, 8)), world.arrive(PROMPT)
    world.settle()
    world.want(other)
    world.want(user, 0)

    world.settle()

    assert world.where(PROMPT) == EVERYWHERE
    assert world.count("demoted") == 0


def test_a_failed_demotion_leaves_the_pages_in_l1() -> None:
    world = World(policy("write_back", device_pages=4))
    world.run(words(0, 8))
    other = world.arrive(words(100, 4))
    world.settle()
    world.want(other)

    world.fail(world.ops(BackUp)[0])

    assert world.where(words(0, 8)) == ["1"] * 4
    world.check()


# ---------------------------------------------------------------- storage that is away


@pytest.mark.parametrize("name", ["write_through", "write_back"])
def test_while_storage_is_down_pages_go_to_l2_and_no_further(name: str) -> None:
    world = World(policy(name, device_pages=6))
    world.send(StorageDown())
    world.run(PROMPT)

    world.run(words(100, 10))

    assert world.done(Store) == 0
    assert world.where(PROMPT)[2:] == ["2", "2"]


def test_what_was_not_stored_while_storage_was_down_is_stored_at_the_next_use() -> None:
    world = World(policy("write_through"))
    world.send(StorageDown())
    world.run(PROMPT)
    world.send(StorageUp())
    assert world.where(PROMPT) == ["12"] * 4

    world.start(PROMPT)

    assert world.where(PROMPT) == EVERYWHERE


# ---------------------------------------------------------------- sync


def test_sync_stores_everything_whatever_the_policy() -> None:
    world = World(policy("write_back", host_pages=4, batch_pages=2))
    world.run(PROMPT)
    world.run(words(100, 9))
    assert world.planner.is_written

    world.send(Synced())
    assert world.ops(BackUp)
    world.settle()

    assert world.planner.is_written
    assert len(world.pools.storage) == 8


def test_sync_into_an_l2_that_is_too_small_and_without_l3_ends() -> None:
    world = World(policy("write_back", host_pages=3, has_storage=False))
    for end in (2, 4, 6, 8):
        world.run([*words(0, end), *words(1000 * end, 2)])
    assert len(world.planner.nodes(NAMESPACE)) == 7

    world.send(Synced())
    world.settle()

    assert world.planner.is_written
    assert world.planner.usage()["host"] <= 3


def test_sync_ends_though_a_store_hangs() -> None:
    world = World(policy("write_through"))
    request = world.start(PROMPT)
    world.compute(request, 9)
    world.finish(world.ops(BackUp)[0])
    (store,) = world.ops(Store)

    world.expire(store)

    assert world.planner.is_written
    assert world.count("failed", "late") == 4
    world.check_empty()


def test_nodes_that_a_sync_waits_for_are_not_joined_under_it() -> None:
    world = World(policy("write_back", host_pages=2, batch_pages=1))
    request = world.start(PROMPT)
    world.compute(request, 4)
    world.start(words(0, 5))
    world.compute(request, 5)

    world.send(Synced())
    world.release(request)
    world.settle()

    assert len(world.pools.storage) == 4
    world.send(Flushed())
    world.check_empty()
