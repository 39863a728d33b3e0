"""What an event costs, by lines of Python run, not by a clock: it does not grow with the rest."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Unpack

import pytest

from hicache.actions import Grant
from hicache.events import Computed, Event, Extended, Flushed, Released, Ticked
from hicache.keys import pack
from hicache.planner import PlannerConfig
from hicache.prefetch import WaitComplete
from tests.planner_config import Settings, config, words
from tests.planner_world import NAMESPACE, Running, World


class Lines:
    """Lines run in the planner and below."""

    num = 0


@contextmanager
def counted() -> Iterator[Lines]:
    """Count the lines of hicache that run, loops line by line."""
    lines = Lines()

    def trace(frame: FrameType, kind: str, _: object) -> Any:
        if "hicache" not in frame.f_code.co_filename:
            return None
        lines.num += kind == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def cost(world: World, event: Event) -> int:
    """Return how many lines an event takes; what it wants is started uncounted."""
    with counted() as lines:
        actions = world.planner.handle(event, world.now)
    for action in actions:
        world.carry_out(action)
    return lines.num


def big(**settings: Unpack[Settings]) -> PlannerConfig:
    return config(settings, page_size=1, device_pages=8000, host_pages=8000, batch_pages=128)


def commit_one(world: World, request: Running) -> int:
    """Return the cost of committing one more decoded page."""
    world.extend(request, request.num_computed + 2)
    world.compute(request, 1)
    world.settle()
    request.tokens.append(9)
    request.keys = world.keys_of(NAMESPACE, request.tokens)
    page = request.committed
    world.pools.device[request.slots[page]] = request.keys[page]
    request.num_computed += 1
    request.committed += 1
    return cost(world, Computed(request.id, pack([9])))


def test_committing_a_decoded_page_costs_the_same_whatever_came_before() -> None:
    costs = []
    for num_pages in (100, 3000):
        world = World(big())
        request = world.start(words(0, num_pages))
        world.compute(request, num_pages)
        world.settle()
        costs.append(commit_one(world, request))

    assert costs[1] <= costs[0] * 1.2 + 20


def test_committing_costs_the_same_however_many_requests_run_and_wait() -> None:
    costs = []
    for num_others in (2, 60):
        world = World(big(prefetch=WaitComplete()))
        for number in range(num_others):
            other = world.start(words(10_000 + 100 * number, 20))
            world.compute(other, 20)
            world.settle()
        request = world.start(words(0, 30))
        world.compute(request, 30)
        world.settle()
        for number in range(num_others):
            world.arrive(words(100_000 + 100 * number, 20))
        costs.append(commit_one_in_flight(world, request))

    assert costs[1] <= costs[0] * 1.2 + 20


def commit_one_in_flight(world: World, request: Running) -> int:
    """Return the cost of committing a page while other operations are in flight."""
    world.send(Extended(request.id, request.num_computed + 1))
    request.tokens.append(9)
    request.keys = world.keys_of(NAMESPACE, request.tokens)
    world.pools.device[request.slots[request.committed]] = request.keys[request.committed]
    request.num_computed += 1
    request.committed += 1
    return cost(world, Computed(request.id, pack([9])))


def test_a_release_costs_the_nodes_of_the_request_and_no_others() -> None:
    costs = []
    for num_others in (2, 60):
        world = World(big())
        for number in range(num_others):
            other = world.start(words(10_000 + 100 * number, 20))
            world.compute(other, 20)
        request = world.start(words(0, 30))
        world.compute(request, 30)
        world.settle()
        for number in range(num_others):
            world.arrive(words(100_000 + 100 * number, 20))
        costs.append(cost(world, Released(request.id)))

    assert costs[1] <= costs[0] * 1.2 + 20


def test_granting_a_long_prefix_costs_its_nodes_not_its_pages() -> None:
    costs = []
    for num_pages in (100, 3000):
        world = World(big(has_storage=False))
        world.run(words(0, num_pages))
        request = world.arrive(words(0, num_pages))
        with counted() as lines:
            answer = world.want(request)
        assert isinstance(answer, Grant)
        costs.append(lines.num)

    assert costs[1] <= costs[0] * 1.2 + 100


@pytest.mark.parametrize("tier", ["device", "host"])
def test_granting_a_chain_of_nodes_costs_in_proportion_to_them(tier: str) -> None:
    costs = []
    for num_nodes in (40, 160):  # beyond what may be put off to a later event
        world = World(big())
        for end in range(num_nodes, 0, -1):
            world.run([*words(0, 2 * end), 70_000 + end])
        if tier == "host":
            world.send(Flushed())
            world.release(world.start(words(0, 2 * num_nodes + 1)))
        request = world.arrive(words(0, 2 * num_nodes + 1))
        world.settle()
        with counted() as lines:
            answer = world.want(request)
        assert isinstance(answer, Grant)
        costs.append(lines.num)
        world.settle()

    assert costs[1] <= costs[0] * 4.5


def test_evicting_costs_the_same_however_many_leaves_there_are() -> None:
    costs = []
    for num_leaves in (50, 500):
        world = World(big())
        for number in range(num_leaves):
            world.run([5, 10 * number, 10 * number + 1])
        free = world.settings.device_pages - world.planner.usage()["device"]
        filling = world.start(words(500_000, free))
        world.compute(filling, free)
        world.settle()
        costs.append(cost(world, Extended(filling.id, free + 8)))
        assert len(filling.slots) == free + 8

    assert costs[1] <= costs[0] * 1.3 + 50


def test_a_tick_costs_nothing_however_much_there_is() -> None:
    costs = []
    for num_others in (2, 60):
        world = World(big())
        for number in range(num_others):
            other = world.start(words(10_000 + 100 * number, 20))
            world.compute(other, 20)
            world.arrive(words(100_000 + 100 * number, 20))
        costs.append(cost(world, Ticked()))

    assert costs[1] <= costs[0]


def test_the_end_of_a_copy_costs_the_same_however_many_writes_wait() -> None:
    costs = []
    for num_others in (2, 60):
        world = World(big())
        requests = [world.start(words(1000 * n, 9)) for n in range(num_others + 1)]
        for request in requests:
            world.compute(request, 4)
            world.compute(request, 5)
        first = next(iter(world.pending))
        action = world.pending.pop(first)
        event = world.pools.end(action, [True] * 4)
        costs.append(cost(world, event))

    assert costs[1] <= costs[0] * 1.2 + 20
