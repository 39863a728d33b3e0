"""Who leaves L1 and L2, what operators may do about it, and how a miss is explained."""

import pytest

from hicache.actions import BackUp, Delete, Fetch, Grant, HitTokens, Wait
from hicache.events import ChainFound, Flushed, Forgotten, Kept, StorageDown, Ticked
from hicache.keys import NamespaceDigest, pack
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


# ---------------------------------------------------------------- flush


def test_flush_empties_l1_and_l2_of_what_no_request_needs() -> None:
    world = World(config())
    world.run(PROMPT)
    running = world.start(words(100, 5))
    world.compute(running, 4)
    world.settle()

    world.send(Flushed())

    assert world.where(PROMPT) == ["3"] * 4
    assert world.where(words(100, 4)) == ["13", "13"]
    assert world.planner.usage()["device"] == 3


# ---------------------------------------------------------------- forget


def test_forget_drops_a_prefix_and_what_is_below_from_every_tier() -> None:
    world = World(config())
    world.run(PROMPT)
    world.run([*words(0, 4), *words(50, 5)])
    world.run(words(100, 4))

    world.send(Forgotten(NAMESPACE, pack(words(0, 4))))

    assert world.where(PROMPT) == [""] * 4
    assert world.where(words(100, 4)) == ["123"] * 2
    assert world.pools.storage == set(world.keys_of(NAMESPACE, words(100, 4)))
    assert world.why(world.start(PROMPT)) == [("forgotten", 4)]


def test_forget_without_a_prefix_drops_the_namespace() -> None:
    world = World(config())
    world.run(PROMPT)
    world.run(words(100, 4))

    world.send(Forgotten(NAMESPACE))

    assert world.planner.usage()["namespaces"] == 0
    assert world.planner.usage()["device"] == world.planner.usage()["host"] == 0
    assert not world.pools.storage


def test_forget_of_what_is_not_known_does_nothing() -> None:
    world = World(config())
    world.run(PROMPT)

    world.send(Forgotten(NamespaceDigest(b"x" * 32)))
    world.send(Forgotten(NAMESPACE, pack([*words(0, 4), 70, 71])))

    assert world.where(PROMPT) == ["123"] * 4
    assert world.done(Delete) == 0


def test_forget_leaves_what_is_in_use() -> None:
    world = World(config())
    world.run(PROMPT)
    request = world.start(words(0, 5))

    world.send(Forgotten(NAMESPACE, pack(words(0, 2))))

    assert request.hit.total == 4
    assert world.where(PROMPT)[2:] == ["", ""]
    world.check()
    world.check_empty()


def test_forget_while_pages_are_being_stored_keeps_those_until_then() -> None:
    world = World(config())
    request = world.start(PROMPT)
    world.compute(request, 9)
    world.finish(world.ops(BackUp)[0])
    world.release(request)

    world.send(Forgotten(NAMESPACE))
    world.check()
    world.settle()

    world.check_empty()


# ---------------------------------------------------------------- keep


def test_a_kept_prefix_outlives_others_until_its_time() -> None:
    world = World(config(device_pages=8, host_pages=0))
    world.run(words(0, 6))
    world.send(Kept(NAMESPACE, pack(words(0, 6)), until=world.now + 100))

    for number in range(1, 5):
        world.run(words(100 * number, 10))
    assert world.where(words(0, 6)) == ["1"] * 3
    assert world.planner.next_deadline() is not None
    world.now += 100
    world.send(Ticked())
    assert world.planner.next_deadline() is None
    world.run(words(600, 16))

    assert world.where(words(0, 6)) == [""] * 3


def test_keeping_again_lengthens_and_never_shortens() -> None:
    world = World(config(device_pages=8, host_pages=0))
    world.run(words(0, 8))
    until = world.now + 100
    world.send(Kept(NAMESPACE, pack(words(0, 8)), until))

    world.send(Kept(NAMESPACE, pack(words(0, 8)), until - 50))
    world.now = until - 40
    world.send(Ticked())
    world.run(words(100, 8))

    assert world.where(words(0, 8)) == ["1"] * 4
    assert world.planner.next_deadline() == until


def test_at_most_half_of_a_tier_is_kept() -> None:
    world = World(config(device_pages=8, host_pages=0))
    world.run(words(0, 6))
    world.run(words(100, 6))

    for first in (0, 100):
        world.send(Kept(NAMESPACE, pack(words(first, 6)), until=world.now + 100))
    world.run(words(200, 10))

    assert world.where(words(0, 6)) == ["1"] * 3
    assert world.where(words(100, 6)) == [""] * 3


def test_what_is_kept_goes_when_there_is_no_other_way() -> None:
    world = World(config(device_pages=8, host_pages=8))
    world.run(words(0, 8))
    world.send(Kept(NAMESPACE, pack(words(0, 8)), until=world.now + 1000))

    world.run(words(100, 16))

    assert world.where(words(100, 16)) == ["123"] * 8
    world.check_empty()


def test_only_what_l1_or_l2_has_is_kept() -> None:
    world = World(config())
    world.run(PROMPT)
    world.send(Flushed())

    world.send(Kept(NAMESPACE, pack(words(0, 8)), until=world.now + 100))
    world.send(Kept(NAMESPACE, pack(words(700, 8)), until=world.now + 100))
    world.send(Kept(NamespaceDigest(b"x" * 32), pack(words(0, 8)), until=world.now + 100))

    assert world.planner.next_deadline() is None


def test_a_kept_prefix_that_is_cut_stays_kept() -> None:
    world = World(config(device_pages=12, host_pages=0))
    world.run(words(0, 8))
    world.send(Kept(NAMESPACE, pack(words(0, 8)), until=world.now + 100))

    world.run([*words(0, 4), *words(50, 4)])
    world.run(words(100, 16))

    assert world.where(words(0, 8)) == ["1"] * 4
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
