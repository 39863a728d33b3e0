"""Requests that wait behind each other for room in L2, to bring up what storage has of them."""

from hicache.actions import Fetch, Grant, HitTokens, Wait
from hicache.events import Flushed
from hicache.prefetch import BestEffort, PrefetchPolicy, WaitComplete
from tests.planner_config import config, words
from tests.planner_scenes import PROMPT
from tests.planner_world import Running, World

OTHER = words(200, 9)


def two_in_l3(policy: PrefetchPolicy) -> World:
    """Return a world with two prompts in L3 only, whose L2 has room for one."""
    world = World(config(host_pages=4, prefetch=policy))
    for prompt in (PROMPT, OTHER):
        world.run(prompt)
    world.send(Flushed())
    assert {*world.where(PROMPT), *world.where(OTHER)} == {"3"}
    return world


def grant(world: World, request: Running) -> None:
    """Ask for a request's turn until it is granted."""
    for _ in range(10):
        answer = world.want(request)
        world.settle()
        if isinstance(answer, Grant):
            return
        assert answer == Wait(request.id, "storage")
    raise AssertionError("never granted")


def test_a_request_without_room_waits_for_those_before_it_however_long() -> None:
    world = two_in_l3(BestEffort())
    first, second = world.arrive(PROMPT), world.arrive(OTHER)
    world.settle()
    world.now += 1000

    assert world.want(second) == Wait(second.id, "storage")
    grant(world, first)
    grant(world, second)

    assert second.hit == HitTokens(storage=8)


def test_a_request_whose_turn_has_come_takes_the_room_of_those_behind_it() -> None:
    world = two_in_l3(WaitComplete())
    world.run(PROMPT)
    first, second = world.arrive(PROMPT), world.arrive(OTHER)
    world.settle()
    assert world.where(OTHER) == ["23"] * 4
    world.run(words(300, 23))
    assert world.where(PROMPT) == ["3"] * 4, "no more in L1, where it was at hand"

    grant(world, first)
    grant(world, second)

    assert (first.hit, second.hit) == (HitTokens(storage=8), HitTokens(storage=8))
    world.check_empty()


def test_it_takes_no_more_than_it_needs_and_the_last_ones_first() -> None:
    world = two_in_l3(WaitComplete())
    short = [words(500 + 10 * index, 3) for index in range(4)]
    for prompt in short:
        world.run(prompt)
    world.send(Flushed())
    world.run(PROMPT)
    first = world.arrive(PROMPT)
    for prompt in short:
        world.arrive(prompt)
    world.settle()
    world.run(words(300, 23))
    assert [world.where(prompt) for prompt in short] == [["23"]] * 4

    world.want(first)

    assert [world.where(prompt) for prompt in short] == [["23"], ["23"], ["3"], ["3"]]


def test_a_request_that_matters_more_takes_the_room_of_one_that_came_before() -> None:
    world = two_in_l3(WaitComplete())
    early = world.arrive(PROMPT)
    world.settle()
    urgent = world.arrive(OTHER, priority=1)
    assert not world.ops(Fetch)

    grant(world, urgent)

    assert urgent.hit == HitTokens(storage=8)
    grant(world, early)
    assert early.hit == HitTokens(storage=8)


def test_what_is_being_fetched_for_those_behind_is_left_to_them() -> None:
    world = two_in_l3(WaitComplete())
    world.run(PROMPT)
    first, second = world.arrive(PROMPT), world.arrive(OTHER)
    assert len(world.ops(Fetch)) == 1
    world.run(words(300, 23))

    world.want(first)

    assert not world.cancelled
    grant(world, first)
    assert not second.is_granted


def test_what_lands_while_l1_is_full_is_used_though_patience_has_ended() -> None:
    world = two_in_l3(BestEffort())
    running = world.start(words(300, 23))
    world.compute(running, 23)
    request = world.arrive(PROMPT)
    assert world.want(request) == Wait(request.id, "storage")
    world.now += 1000
    assert world.want(request) == Wait(request.id, "device_full")

    world.settle()
    world.release(running)

    assert isinstance(world.want(request), Grant)
    assert request.hit == HitTokens(storage=8)
