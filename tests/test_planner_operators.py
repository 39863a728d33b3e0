"""What operators do to the tiers: flush, forget, keep."""

from hicache.actions import BackUp, Delete, Fetch, Store
from hicache.events import Flushed, Forgotten, Kept, Ticked
from hicache.keys import NamespaceDigest, pack
from hicache.prefetch import WaitComplete
from tests.planner_config import config, words
from tests.planner_world import NAMESPACE, World

PROMPT = words(0, 9)


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
    assert world.where(PROMPT) == ["12", "12", "", ""]
    assert not world.pools.storage
    world.check()
    world.check_empty()


def test_forget_of_what_leads_to_pages_in_use_leaves_that_and_its_records() -> None:
    world = World(config(batch_pages=2, prefetch=WaitComplete()))
    world.run(PROMPT)
    world.send(Flushed())
    request = world.arrive(PROMPT)
    upper, lower = world.ops(Fetch)
    world.release(request)
    world.fail(upper)

    world.send(Forgotten(NAMESPACE))
    world.check()
    assert world.where(PROMPT) == ["3", "3", "", ""]
    world.finish(lower)

    assert len(world.pools.storage) == 2
    world.check_empty()


def test_forget_while_half_of_a_node_is_being_stored_leaves_all_of_it() -> None:
    world = World(config(batch_pages=2))
    request = world.start(PROMPT)
    world.compute(request, 9)
    world.finish(world.ops(BackUp)[0])
    world.finish(world.ops(Store)[0])
    world.release(request)

    world.send(Forgotten(NAMESPACE))
    world.settle()

    assert world.where(PROMPT) == ["123"] * 4
    assert len(world.pools.storage) == 4


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

    world.send(Kept(NAMESPACE, pack(words(0, 8)), until + 50))
    world.send(Kept(NAMESPACE, pack(words(0, 8)), until - 50))
    world.now = until + 10
    world.send(Ticked())
    world.run(words(100, 8))

    assert world.where(words(0, 8)) == ["1"] * 4
    assert world.planner.next_deadline() == until + 50


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
