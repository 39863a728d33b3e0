"""Who leaves L1 and L2 first, and why a page was missed."""

import pytest

from hicache.actions import BackUp, Fetch, Grant, HitTokens, Wait
from hicache.events import ChainFound, Flushed, StorageDown
from hicache.keys import pack
from tests.planner_config import config, words
from tests.planner_world import NAMESPACE, World

PROMPT = words(0, 9)


# ---------------------------------------------------------------- L1


def test_l1_gives_up_the_least_recently_used_from_the_tail() -> None:
    world = World(config(device_pages=8, host_pages=0))
    world.run(words(0, 8))
    world.run(words(100, 6))

    world.run(words(200, 4))

    assert world.where(words(0, 8)) == ["1", "1", "1", ""]
    assert world.where(words(100, 6)) == ["1"] * 3


def test_what_l2_has_leaves_l1_at_once() -> None:
    world = World(config(device_pages=4))
    world.run(words(0, 8))
    request = world.arrive(words(100, 4))
    world.settle()

    answer = world.want(request)

    assert isinstance(answer, Grant)
    assert world.count("demoted", "room") == 2


def test_a_leased_prefix_is_never_evicted() -> None:
    world = World(config(device_pages=4, host_pages=0))
    world.run(words(0, 6))
    world.start(words(0, 5), ahead=0)
    other = world.arrive(words(100, 6))

    assert isinstance(world.want(other), Wait)

    assert world.where(words(0, 6))[:2] == ["1", "1"]


def test_a_waiting_request_gives_up_l1_before_another_waits() -> None:
    world = World(config(device_pages=4))
    world.run(words(0, 8))
    world.arrive([*words(0, 8), *words(50, 4)])
    other = world.arrive(words(100, 8))
    world.settle()

    answer = world.want(other)
    world.check()

    assert isinstance(answer, Grant)
    assert world.planner.usage()["device"] == 4


# ---------------------------------------------------------------- L2


def test_redundant_copies_of_l1_pages_leave_l2_first() -> None:
    """L2 holds what L1 does not."""
    world = World(config(device_pages=8, host_pages=12))
    world.run(words(0, 8))
    world.run(words(100, 16))
    assert world.where(words(0, 8)) == ["23"] * 4
    assert world.planner.usage()["host"] == 12

    world.run(words(200, 4))

    assert world.where(words(0, 8)) == ["23"] * 4
    assert world.where(words(100, 16)) == ["123"] * 4 + ["13"] * 2 + ["23"] * 2
    assert world.count("evicted", "redundant") == 2


def test_copies_of_l1_pages_that_are_not_stored_are_no_victims_before_others() -> None:
    world = World(config(device_pages=8, host_pages=6))
    world.run(words(0, 8))
    world.send(Flushed())
    world.start(words(0, 5))
    world.send(StorageDown())
    kept = world.run(words(100, 4))
    assert world.where(kept.tokens) == ["12", "12"]

    world.run(words(200, 4))

    assert world.where(kept.tokens) == ["12", "12"]


def test_under_write_back_any_copy_of_an_l1_page_is_redundant() -> None:
    world = World(config(device_pages=6, host_pages=4, write="write_back", has_storage=False))
    world.run(words(0, 8))
    world.run(words(100, 8))
    world.start(words(0, 8), ahead=0)

    world.run(words(200, 4))
    world.run(words(300, 4))

    assert "2" not in "".join(world.where(words(0, 8))[:3])


def test_a_page_whose_copy_in_l2_was_dropped_is_demoted_again_when_l1_evicts_it() -> None:
    world = World(config(device_pages=8, host_pages=8))
    world.run(words(0, 8))
    world.run(words(100, 8))
    world.run(words(200, 4))
    assert "13" in world.where(words(0, 8)) + world.where(words(100, 8))
    before = world.done(BackUp)

    world.run(words(300, 16))

    assert world.done(BackUp) > before + 1
    assert world.count("demoted") >= 8


def test_the_last_copy_of_a_page_above_one_in_use_stays() -> None:
    world = World(config(device_pages=4, host_pages=6))
    world.run(words(0, 8))
    world.run(words(100, 8))
    keys = world.keys_of(NAMESPACE, words(0, 8))
    for op in [*world.pending]:
        world.finish(op)
    world.pools.storage.difference_update(keys[:2])
    request = world.arrive(words(0, 9))

    world.settle()

    world.check()
    world.release(request)
    world.check_empty()


def test_l2_evicts_for_a_fetch_and_the_fetch_lands() -> None:
    world = World(config(device_pages=8, host_pages=8))
    world.run(words(0, 8))
    world.run(words(100, 16))
    assert world.planner.usage()["host"] == 8

    request = world.start(words(0, 9))

    assert request.hit == HitTokens(storage=8) or request.hit == HitTokens(host=8)


# ---------------------------------------------------------------- beliefs


def test_no_more_than_so_many_branches_are_known_for_l3_alone() -> None:
    world = World(config(max_beliefs=3))
    for number in range(10):
        prompt = words(100 * number, 4)
        keys = tuple(world.keys_of(NAMESPACE, prompt))
        world.pools.storage.update(keys)
        world.send(ChainFound(NAMESPACE, pack(prompt), keys))

    assert len(world.planner.nodes(NAMESPACE)) == 3
    assert world.start(words(0, 5)).hit == HitTokens(storage=4)
    world.check()


# ---------------------------------------------------------------- why a page was missed


def test_a_page_that_was_never_seen_is_missed_for_that() -> None:
    world = World(config())

    request = world.start(PROMPT)

    assert world.why(request) == [("never_seen", 4)]


@pytest.mark.parametrize(
    ("host_pages", "has_storage", "reason"),
    [(0, False, "evicted_from_device"), (4, False, "evicted_from_host")],
)
def test_a_page_that_was_evicted_is_missed_for_that(
    host_pages: int, has_storage: bool, reason: str
) -> None:
    world = World(config(device_pages=4, host_pages=host_pages, has_storage=has_storage))
    world.run(words(0, 8))
    world.run(words(100, 8))
    world.run(words(200, 8))

    request = world.start(words(0, 7))

    assert world.why(request) == [(reason, 3)]


def test_a_page_that_was_not_written_down_in_time_is_missed_for_that() -> None:
    world = World(config(device_pages=4, host_pages=4, write="write_back"))
    world.send(StorageDown())
    world.run(words(0, 8))
    world.run(words(100, 8))
    world.run(words(200, 8))

    request = world.start(words(0, 7))

    assert ("not_written_down", 3) in world.why(request)


def test_without_a_memory_of_ghosts_every_miss_is_of_something_never_seen() -> None:
    world = World(config(device_pages=4, host_pages=0, num_ghosts=0))
    world.run(words(0, 8))
    world.run(words(100, 8))

    assert world.why(world.start(words(0, 7))) == [("never_seen", 3)]


def test_the_oldest_ghosts_are_forgotten() -> None:
    world = World(config(device_pages=4, host_pages=0, num_ghosts=8))
    for first in (0, 100, 200):
        world.run(words(first, 8))

    request = world.start(words(0, 7))
    world.release(request)

    assert world.why(request) == [("never_seen", 3)]
    assert world.why(world.start(words(100, 7))) == [("evicted_from_device", 3)]


def test_pages_that_are_known_and_pages_that_are_not_are_told_apart() -> None:
    world = World(config())
    world.run(PROMPT)
    world.send(Flushed())
    world.send(StorageDown())

    request = world.start([*words(0, 8), *words(50, 5)])

    assert world.why(request) == [("storage_down", 4), ("never_seen", 2)]
    assert world.done(Fetch) == 0
