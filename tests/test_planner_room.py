"""The parts of the planner by themselves, where a whole world shows too little."""

from array import array

import pytest

from hicache.events import Finished, OpId
from hicache.keys import NamespaceDigest, PageKey, pack
from hicache.planner.misses import Misses
from hicache.planner.residency import Residency
from hicache.planner.room import Room
from hicache.planner.weighing import Weighing
from hicache.rates import Link, Rate
from hicache.tree import TierPages
from tests.planner_config import config, words
from tests.planner_world import NAMESPACE, World


def test_the_last_copy_above_one_that_is_held_is_no_victim_until_something_has_ended() -> None:
    books = Residency(config(page_size=1, host_pages=2))
    room, tree = Room(books), books.tree(NAMESPACE)
    slots = books.host_slots.allocate(2)
    assert slots is not None
    top = tree.add(tree.root, pack([1]), 0.0)
    books.set_pages(top, "host", slots[:1])
    middle = tree.add(top, pack([2]), 0.0)
    middle.stored = 1
    books.refresh(middle)
    below = tree.add(middle, pack([3]), 0.0)
    books.set_pages(below, "host", slots[1:])
    op = books.begin("store", 1)
    books.hold(below, "host", op)

    in_use = room.take_host(1)
    books.check([], 0)
    books.end(op)
    later = room.take_host(1)

    assert in_use is None
    assert later is not None
    assert len(later) == 1


def test_a_last_copy_above_pages_that_nobody_holds_goes_with_them() -> None:
    books = Residency(config(page_size=1, host_pages=1))
    room, tree = Room(books), books.tree(NAMESPACE)
    slots = books.host_slots.allocate(1)
    assert slots is not None
    top = tree.add(tree.root, pack([1]), 0.0)
    books.set_pages(top, "host", slots)
    below = tree.add(top, pack([2]), 0.0)
    below.stored = 1

    assert room.take_host(1) is not None

    assert list(tree.nodes()) == []


def test_match_says_what_each_tier_could_give_and_nothing_of_a_namespace_not_seen() -> None:
    world = World(config())
    world.run(words(0, 9))

    known = world.planner.match(NAMESPACE, pack(words(0, 9)))
    unknown = world.planner.match(NamespaceDigest(b"x" * 32), pack(words(0, 9)))

    assert known == TierPages(4, 4, 4)
    assert unknown == TierPages(0, 0, 0)


def test_an_operation_that_is_not_known_is_a_bug() -> None:
    world = World(config())

    with pytest.raises(KeyError):
        world.planner.handle(Finished(OpId(5), [True]), 0.0)


def test_the_oldest_misses_are_asked_for_again() -> None:
    misses = Misses(memory_s=10.0)
    keys = [PageKey(number.to_bytes(32, "little")) for number in range(100_001)]

    for key in keys:
        misses.add(key, 0.0)

    assert not misses.has(keys[0], 1.0)
    assert misses.has(keys[1], 9.0)
    assert not misses.has(keys[1], 10.0)


def test_a_rate_weighs_measurements_by_their_size() -> None:
    rate = Rate()
    assert rate.seconds(100) == 0.0

    rate.measured(100, 1.0)
    rate.measured(100, 3.0)

    assert rate.seconds(100) == pytest.approx((0.75 * 1.0 + 3.0) / 1.75)


def test_a_seeded_rate_is_known_at_once() -> None:
    assert Rate(50.0).seconds(100) == 2.0


def test_time_in_which_operations_overlap_counts_once() -> None:
    link = Link()

    link.landed(10, started=0.0, landed=1.0)
    link.landed(10, started=0.0, landed=2.0)
    assert link.seconds(10) == pytest.approx(1.0)

    link.landed(10, started=0.0, landed=1.5)
    assert link.seconds(10) < 1.0


def test_a_load_that_says_how_long_it_took_is_believed() -> None:
    weighing = Weighing(config())
    weighing.prefill.measured(2, 1.0)

    weighing.loaded(1, started=0.0, now=100.0, seconds=0.5)

    assert not weighing.is_load_too_slow(1)
    weighing.loaded(1, started=0.0, now=100.0, seconds=None)
    assert weighing.is_load_too_slow(1)


def test_slots_are_the_callers_own() -> None:
    """Not slices of something big that would stay alive with them."""
    world = World(config())
    request = world.start(words(0, 8))
    world.compute(request, 8)

    request.slots.append(99)

    assert isinstance(request.slots, array)
    world.planner.check()
