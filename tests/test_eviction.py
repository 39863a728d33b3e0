"""Eviction orders: what goes first under each policy, and at what cost."""

import gc
import math
import random
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache.eviction import POLICIES, EvictionOrder, Rank
from hicache.keys import pack
from hicache.tree import HiRadixTree, Node, Residence
from tests.trees import NAMESPACE


def in_l1(node: Node) -> Residence:
    return node.device


def new_nodes(num_nodes: int) -> list[Node]:
    """Return nodes, each as old as its number."""
    # More than one tree: to sort 50,000 children of one node would take most of the time.
    trees = [HiRadixTree(NAMESPACE, page_size=1) for _ in range(1 + num_nodes // 100)]
    roots = [trees[n // 100].root for n in range(num_nodes)]
    return [root.tree.add(root, pack([n]), now=float(n)) for n, root in enumerate(roots)]


def order_of(rank: Rank, nodes: list[Node]) -> EvictionOrder:
    order = EvictionOrder(rank, in_l1)
    for node in nodes:
        order.put(node)
    return order


# ---------------------------------------------------------------- policies


def four_nodes() -> list[Node]:
    """Return nodes that every policy orders differently."""
    a, b, c, d = new_nodes(4)
    a.last_used, a.uses, a.priority = 9.0, 1, 2
    b.last_used, b.uses, b.priority = 3.0, 5, 0
    c.last_used, c.uses, c.priority = 7.0, 2, 0
    d.last_used, d.uses, d.priority = 4.0, 1, 1
    return [a, b, c, d]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", "bdca"),  # last used 3, 4, 7, 9
        ("mru", "acdb"),
        ("fifo", "abcd"),
        ("filo", "dcba"),
        ("lfu", "dacb"),  # 1 use at 4, 1 use at 9, 2 uses, 5 uses
        ("slru", "dabc"),  # used once at 4, 9; used again at 3, 7
        ("priority", "bcda"),  # 0 at 3, 0 at 7, 1, 2
    ],
)
def test_a_policy_says_who_goes_first(policy: str, expected: str) -> None:
    nodes = four_nodes()

    order = order_of(POLICIES[policy], nodes)

    assert order.nodes() == [nodes["abcd".index(name)] for name in expected]
    assert order.first() is order.nodes()[0]


def test_every_policy_is_tested() -> None:
    assert set(POLICIES) == {"lru", "mru", "fifo", "filo", "lfu", "slru", "priority"}


# ---------------------------------------------------------------- the order


def test_an_empty_order_has_no_first() -> None:
    order = EvictionOrder(POLICIES["lru"], in_l1)

    assert order.first() is None
    assert (len(order), order.nodes()) == (0, [])


def test_the_first_stays_until_it_is_discarded() -> None:
    one, two = nodes = new_nodes(2)
    order = order_of(POLICIES["lru"], nodes)

    assert order.first() is one
    assert order.first() is one
    order.discard(one)
    assert order.first() is two
    order.discard(two)
    assert order.first() is None


def test_discarding_what_is_not_in_is_harmless() -> None:
    one, two = new_nodes(2)
    order = order_of(POLICIES["lru"], [one])

    order.discard(two)
    order.discard(one)
    order.discard(one)

    assert len(order) == 0


def test_a_node_keeps_its_place_until_it_is_put_again() -> None:
    one, two = nodes = new_nodes(2)
    order = order_of(POLICIES["lru"], nodes)

    one.last_used = 5.0
    assert order.first() is one

    order.put(one)
    assert order.first() is two
    assert len(order) == 2


def test_equal_ranks_go_in_the_order_in_which_they_came_even_if_nodes_change() -> None:
    nodes = new_nodes(9)
    for node in nodes:
        node.last_used = 1.0
    order = order_of(POLICIES["lru"], nodes[::-1])

    nodes[0].tree.grow(nodes[0], pack([7]))

    assert order.nodes() == nodes[::-1]
    order.check()


def test_a_node_has_a_place_in_each_tier() -> None:
    (node,) = new_nodes(1)
    device = order_of(POLICIES["lru"], [node])
    host = EvictionOrder(POLICIES["lru"], lambda node: node.host)
    host.put(node)

    device.discard(node)

    assert (device.first(), host.first()) == (None, node)


def test_check_sees_a_node_that_was_lost() -> None:
    nodes = new_nodes(3)
    order = order_of(POLICIES["lru"], nodes)
    order.check()

    nodes[1].device.entry = None

    with pytest.raises(AssertionError):
        order.check()


NUM_NODES = 700
"""More than an order keeps in one run."""

PICK = st.one_of(st.integers(0, 11), st.integers(0, NUM_NODES - 1))


class OrderMachine(RuleBasedStateMachine):
    """An order against a list that is sorted anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.all = new_nodes(NUM_NODES)
        self.model: dict[Node, tuple[object, int]] = {}
        self.times = count()

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def choose(self, policy: str) -> None:
        self.rank = POLICIES[policy]
        self.order = EvictionOrder(self.rank, in_l1)

    @rule(pick=PICK, time=st.integers(0, 9), uses=st.integers(0, 3))
    def use(self, pick: int, time: int, uses: int) -> None:
        node = self.all[pick]
        node.last_used, node.created, node.uses, node.priority = time, 9 - time, uses, uses // 2

        self.order.put(node)

        self.model[node] = (self.rank(node), next(self.times))

    @rule(pick=PICK, times=st.integers(1, 100))
    def use_often(self, pick: int, times: int) -> None:
        node = self.all[pick]
        for _ in range(times):
            self.order.put(node)

        self.model[node] = (self.rank(node), next(self.times))

    @rule(first=PICK, step=st.sampled_from([-3, -1, 1, 2]))
    def use_many(self, first: int, step: int) -> None:
        for time, node in enumerate(self.all[first::step]):
            node.last_used = node.created = time
            self.order.put(node)
            self.model[node] = (self.rank(node), next(self.times))

    @rule(first=PICK, step=st.sampled_from([-3, -1, 1, 2]))
    def discard_many(self, first: int, step: int) -> None:
        for node in self.all[first::step]:
            self.order.discard(node)
            self.model.pop(node, None)

    @rule(pick=PICK)
    def discard(self, pick: int) -> None:
        self.order.discard(self.all[pick])

        self.model.pop(self.all[pick], None)

    @precondition(lambda self: self.model)
    @rule()
    def evict(self) -> None:
        victim = self.order.first()

        assert victim is not None
        assert self.model[victim] == min(self.model.values())
        self.order.discard(victim)
        del self.model[victim]

    @invariant()
    def agrees_with_a_sorted_list(self) -> None:
        expected = sorted(self.model, key=lambda node: self.model[node])
        assert self.order.nodes() == expected
        assert self.order.first() == (expected[0] if expected else None)
        assert len(self.order) == len(expected)
        self.order.check()


@pytest.mark.slow
def test_an_order_agrees_with_a_sorted_list() -> None:
    run_state_machine_as_test(OrderMachine, settings=settings(max_examples=60))


# ---------------------------------------------------------------- what it costs


class Counted:
    """A rank that counts how often ranks are made and compared, and how many are kept."""

    made = compared = kept = 0

    def __init__(self, value: object) -> None:
        self.value = value
        Counted.made += 1
        Counted.kept += 1

    def __del__(self) -> None:
        Counted.kept -= 1

    def __lt__(self, other: "Counted") -> bool:
        Counted.compared += 1
        return bool(self.value < other.value)  # type: ignore[operator]


@pytest.fixture(autouse=True)
def _count_from_nought() -> None:
    gc.collect()
    Counted.made = Counted.compared = Counted.kept = 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_among_50_000_leaves_a_place_costs_a_few_comparisons_and_a_victim_none(policy: str) -> None:
    nodes, rank = new_nodes(50_000), POLICIES[policy]
    shuffled = random.Random(1)
    for node in nodes:
        node.last_used, node.uses = shuffled.random(), shuffled.randrange(5)
        node.priority = shuffled.randrange(3)

    order = order_of(lambda node: Counted(rank(node)), nodes)

    assert Counted.made == 50_000
    assert Counted.compared <= 50_000 * 2 * math.log2(50_000)
    Counted.made = Counted.compared = 0

    for _ in range(1000):
        victim = order.first()
        assert victim is not None
        order.discard(victim)

    assert Counted.made == Counted.compared == 0


def test_to_touch_a_node_as_the_latest_costs_a_comparison_or_two() -> None:
    nodes, touches, shuffled = new_nodes(2_000), 10_000, random.Random(1)
    order = order_of(lambda node: Counted(node.last_used), nodes)
    Counted.made = Counted.compared = 0

    for time in range(touches):
        node = shuffled.choice(nodes)
        node.last_used = 2_000.0 + time
        order.discard(node)
        order.put(node)

    order.check()
    assert Counted.made == touches
    assert Counted.compared <= touches * 2


def test_places_given_up_do_not_pile_up() -> None:
    nodes = new_nodes(100)
    order = order_of(lambda node: Counted(node.last_used), nodes)

    for time in range(10_000):
        nodes[time % 100].last_used = 100.0 + time
        order.put(nodes[time % 100])

    assert Counted.kept <= 300


def test_nodes_that_left_are_let_go() -> None:
    nodes = new_nodes(10_000)
    order = order_of(lambda node: Counted(node.last_used), nodes)

    for node in nodes:
        order.discard(node)

    assert Counted.kept <= 100
