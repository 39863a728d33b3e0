"""The tree does what a planner may do with it, in any order, and agrees with a page table."""

from array import array
from collections.abc import Callable
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

from hicache.keys import PageKey, chain, pack
from hicache.tree import Claim, HiRadixTree, Node, Residence
from hicache.tree import node as module_of_nodes
from tests.tree_model import Page, PageTable, Prefix, key_of, places, prefixes, spell
from tests.trees import NAMESPACE, reside

PAGE = st.one_of(st.integers(0, 2), st.integers(0, 15))
"""A page by its number: few of them often, more than eight of them at all."""

PAGES = st.lists(PAGE, min_size=1, max_size=8)
TIER = st.sampled_from(["device", "host"])
PICK = st.integers(0, 100)
OTHER = {"device": "host", "host": "device"}


class Operation(Claim):
    """Brings the pages behind those that a node has in a tier; may read another copy of it."""

    def __init__(self, node: Node, target: str, pages: list[Prefix]) -> None:
        self.nodes = [node]
        self.target = target
        self.pages = pages

    def on_split(self, upper: Node, lower: Node) -> None:
        self.nodes.insert(self.nodes.index(lower), upper)

    def on_detach(self, node: Node) -> None:
        raise AssertionError("no node with a claim is removed here")

    def covers(self, node: Node) -> bool:
        return node in self.nodes


def residence(node: Node, tier: str) -> Residence:
    return node.device if tier == "device" else node.host


def reach(node: Node) -> int:
    """Return how many leading pages are somewhere."""
    return max(node.device.num_pages, node.host.num_pages, node.stored + node.storing)


class TreeMachine(RuleBasedStateMachine):
    """Pages of one token."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.splits: list[tuple[Node, Node]] = []
        self.tree = HiRadixTree(
            NAMESPACE, self.page_size, lambda *halves: self.splits.append(halves)
        )
        self.pages = PageTable(self.page_size)
        self.leased: list[Node] = []
        self.operations: list[Operation] = []
        self.hashed: set[PageKey] = set()
        self.slots = count()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module_of_nodes, "chain", self.chain)

    def teardown(self) -> None:
        self.patch.undo()

    def chain(self, parent: bytes, tokens: bytes, page_nbytes: int) -> list[PageKey]:
        """Hash, and remember what has been hashed."""
        found = chain(parent, tokens, page_nbytes)
        assert not self.hashed.intersection(found), "a key was computed again"
        self.hashed.update(found)
        return found

    def pick(self, pick: int, suits: Callable[[Node], object]) -> Node | None:
        """Return one of the nodes that suit, if any does."""
        nodes = [node for node in self.tree.nodes() if suits(node)]
        return nodes[pick % len(nodes)] if nodes else None

    # ------------------------------------------------------------ looking

    @rule(pages=PAGES, rest=st.integers(0, 3))
    def match(self, pages: list[int], rest: int) -> None:
        tokens = spell(pages, self.page_size)
        self.look(tokens[: len(tokens) - rest])

    def look(self, tokens: Prefix) -> None:
        found = self.tree.match(pack(tokens))
        partial = self.tree.partial(found, pack(tokens))

        assert found.num_pages == len(self.pages.path(tokens))
        assert found.tiers() == self.pages.tiers(tokens)
        assert (partial.num_tokens if partial else 0) == self.pages.partial(tokens)
        if partial:
            end = found.num_pages * self.page_size + partial.num_tokens
            assert prefixes(partial.node)[partial.index][:end] == tokens[:end]

    @rule(pick=PICK, index=PICK)
    def ask_for_a_key(self, pick: int, index: int) -> None:
        if node := self.pick(pick, lambda node: True):
            index %= node.num_pages

            assert node.key(index) == key_of(prefixes(node)[index], self.page_size)

    # ------------------------------------------------------------ growing

    @initialize(sequences=st.lists(st.tuples(PAGES, TIER), max_size=12))
    def begin_with_a_forest(self, sequences: list[tuple[list[int], str]]) -> None:
        for pages, tier in sequences:
            self.insert(pages, tier)

    @rule(pages=PAGES, tier=TIER)
    def insert(self, pages: list[int], tier: str) -> None:
        tokens = spell(pages, self.page_size)
        self.look(tokens)
        num_known = len(self.pages.path(tokens))

        node = self.tree.locate(pack(tokens))

        assert node.end == num_known
        if num_known < len(pages):
            leaf = self.tree.add(node, pack(tokens[num_known * self.page_size :]), now=0)
            self.fill(leaf, tier)

    @rule(pages=st.lists(PAGE, max_size=2))
    def insert_a_fan(self, pages: list[int]) -> None:
        for page in range(10):
            self.insert([*pages, page], "host")

    @rule(pick=PICK, pages=PAGES)
    def grow(self, pick: int, pages: list[int]) -> None:
        def may_grow(node: Node) -> bool:
            is_whole = len(node.device.slots) == node.num_pages
            return is_whole and not node.children and not node.claims

        if node := self.pick(pick, may_grow):
            self.tree.grow(node, pack(spell(pages, self.page_size)))
            self.fill(node, "device")

    @rule(pick=PICK, tier=TIER)
    def copy(self, pick: int, tier: str) -> None:
        """Make a node whole in a tier."""
        if node := self.pick(pick, lambda node: not node.claims):
            self.fill(node, tier)

    def fill(self, node: Node, tier: str) -> None:
        parent = node.parent
        assert parent is not None
        if parent.device.num_pages < parent.num_pages:  # L1 is closed under prefixes
            tier = "host"
        kept = residence(node, tier).slots
        added = array("i", [next(self.slots) for _ in range(node.num_pages - len(kept))])
        reside(node, tier, kept + added)
        for prefix, slot in zip(prefixes(node)[len(kept) :], added, strict=True):
            page = self.pages.setdefault(prefix, Page(num_leases=node.leases))
            setattr(page, tier, slot)

    # ------------------------------------------------------------ nothing to see in the pages

    @rule(pick=PICK, at=PICK)
    def split(self, pick: int, at: int) -> None:
        if node := self.pick(pick, lambda node: node.num_pages > 1):
            upper = self.tree.split(node, 1 + at % (node.num_pages - 1))

            assert self.splits[-1] == (upper, node)

    @rule(pick=PICK)
    def merge(self, pick: int) -> None:
        if node := self.pick(pick, self.tree.is_mergeable):
            run = [node]
            while self.tree.is_mergeable(run[0]):
                assert run[0].parent is not None
                run.insert(0, run[0].parent)

            assert self.tree.merge(run) is node

            assert not set(run[:-1]).intersection(self.tree.nodes())
            self.leased = [node if lease in run else lease for lease in self.leased]

    # ------------------------------------------------------------ leasing

    @rule(pick=PICK)
    def lease(self, pick: int) -> None:
        if node := self.pick(pick, lambda node: node.device.num_pages == node.num_pages):
            free = [above for above in reversed(node.path()) if above.leases == 0]

            assert self.tree.lease(node) == free

            self.leased.append(node)
            self.count_lease(node, 1)

    @precondition(lambda self: self.leased)
    @rule(pick=PICK)
    def unlease(self, pick: int) -> None:
        node = self.leased.pop(pick % len(self.leased))

        free = self.tree.unlease(node)

        assert free == [above for above in reversed(node.path()) if above.leases == 0]
        self.count_lease(node, -1)

    def count_lease(self, node: Node, change: int) -> None:
        for above in node.path():
            for prefix in prefixes(above):
                self.pages[prefix].num_leases += change

    # ------------------------------------------------------------ losing

    @rule(pick=PICK, num_pages=st.integers(1, 4), tier=TIER)
    def evict(self, pick: int, num_pages: int, tier: str) -> None:
        """Trim the tail of a copy. What is nowhere any more is forgotten, of leaves only."""

        def may_go(node: Node) -> bool:
            where = residence(node, tier)
            other = max(residence(node, OTHER[tier]).num_pages, node.stored + node.storing)
            is_needed = tier == "device" and (node.leases or where.children)
            is_last = node.children and other < node.num_pages
            is_busy = where.incoming or where.holds
            return bool(where.slots) and not (is_busy or is_needed or is_last)

        if node := self.pick(pick, may_go):
            slots = residence(node, tier).slots
            keep = max(0, len(slots) - num_pages)
            for prefix in prefixes(node)[keep : len(slots)]:
                setattr(self.pages[prefix], tier, None)
            reside(node, tier, slots[:keep])
            self.shrink(node)

    @rule(pick=PICK)
    def lose_a_record(self, pick: int) -> None:
        def may_lose(node: Node) -> bool:
            is_elsewhere = max(node.device.num_pages, node.host.num_pages) == node.num_pages
            return node.stored > 0 and not node.claims and (is_elsewhere or not node.children)

        if node := self.pick(pick, may_lose):
            node.stored -= 1
            self.pages[prefixes(node)[node.stored]].is_stored = False
            self.shrink(node)

    def shrink(self, node: Node) -> None:
        keep = reach(node)
        if keep < node.num_pages:
            self.forget(prefixes(node)[keep:])
            self.tree.shrink(node, keep)

    @rule(pick=PICK)
    def remove(self, pick: int) -> None:
        top = self.pick(pick, lambda node: len(node.children) < 2)
        if top is None:
            return
        below = [node for node in self.tree.nodes() if top in node.path()]
        if any(node.leases or node.claims for node in below):
            return
        for node in below:
            self.forget(prefixes(node))

        self.tree.remove(top)

        assert not set(below).intersection(self.tree.nodes())

    def forget(self, pages: list[Prefix]) -> None:
        for prefix in pages:
            del self.pages[prefix]
            self.hashed.discard(key_of(prefix, self.page_size))

    # ------------------------------------------------------------ operations

    @rule(pick=PICK, num_pages=st.integers(1, 8), tier=TIER)
    def load_or_back_up(self, pick: int, num_pages: int, tier: str) -> None:
        def is_due(node: Node) -> bool:
            assert node.parent is not None
            above = node.parent.device.num_pages == node.parent.num_pages
            source, target = residence(node, OTHER[tier]), residence(node, tier)
            is_closed = tier == "host" or above
            return is_closed and not node.claims and len(source.slots) > len(target.slots)

        if node := self.pick(pick, is_due):
            source = residence(node, OTHER[tier])
            source.holds += 1
            self.bring(node, tier, num_pages, len(source.slots))

    @rule(pick=PICK, num_pages=st.integers(1, 8))
    def fetch(self, pick: int, num_pages: int) -> None:
        def is_due(node: Node) -> bool:
            return node.stored > len(node.host.slots) and not node.claims

        if node := self.pick(pick, is_due):
            self.bring(node, "host", num_pages, node.stored)

    @rule(pick=PICK, num_pages=st.integers(1, 8))
    def store(self, pick: int, num_pages: int) -> None:
        def is_due(node: Node) -> bool:
            return len(node.host.slots) > node.stored and not node.claims

        if node := self.pick(pick, is_due):
            node.host.holds += 1
            node.storing = min(num_pages, len(node.host.slots) - node.stored)
            self.begin(node, "storage", node.stored, node.storing)

    def bring(self, node: Node, tier: str, num_pages: int, last: int) -> None:
        here = residence(node, tier).slots
        num_pages = min(num_pages, last - len(here))
        reside(node, tier, here, [next(self.slots) for _ in range(num_pages)])
        self.begin(node, tier, len(here), num_pages)

    def begin(self, node: Node, target: str, first: int, num_pages: int) -> None:
        op = Operation(node, target, prefixes(node)[first : first + num_pages])
        node.claims = (op,)
        for prefix in op.pages:
            self.pages[prefix].on_way_to = target
        self.operations.append(op)

    @precondition(lambda self: self.operations)
    @rule(pick=PICK, num_good=st.one_of(st.just(100), st.integers(0, 4)))
    def finish(self, pick: int, num_good: int) -> None:
        """Let the first pages arrive and the rest fail; but what is needed in L1 arrives."""
        op = self.operations.pop(pick % len(self.operations))
        below = [child for node in op.nodes for child in node.children.values()]
        is_needed = any(node.leases for node in op.nodes) or any(
            child.device.num_pages for child in below if child not in op.nodes
        )
        if op.target == "device" and is_needed:
            num_good = 100
        for prefix in op.pages:
            self.pages[prefix].on_way_to = None
        for node in op.nodes:
            arrived = [prefix for prefix in op.pages[:num_good] if prefix in prefixes(node)]
            self.arrive(node, op.target, arrived)

    def arrive(self, node: Node, target: str, arrived: list[Prefix]) -> None:
        node.claims = ()
        node.device.holds = node.host.holds = 0  # a node has one operation at a time here
        if target == "storage":
            for prefix in arrived:
                self.pages[prefix].is_stored = True
            node.stored, node.storing = node.stored + len(arrived), 0
        else:
            where = residence(node, target)
            good = where.incoming[: len(arrived)]
            for prefix, slot in zip(arrived, good, strict=True):
                setattr(self.pages[prefix], target, slot)
            reside(node, target, where.slots + good)

    # ------------------------------------------------------------ what holds after each step

    @invariant()
    def the_books_are_in_order(self) -> None:
        self.tree.check()

    @invariant()
    def each_page_is_where_the_table_says(self) -> None:
        assert places(self.tree) == self.pages

    @invariant()
    def claims_cover_what_is_on_its_way(self) -> None:
        for op in self.operations:
            assert all(node.claims == (op,) for node in op.nodes)
            covered = [prefix for node in op.nodes for prefix in prefixes(node)]
            assert covered.index(op.pages[0]) + len(op.pages) <= len(covered)


class PairMachine(TreeMachine):
    """Pages of two tokens."""

    page_size = 2


class QuadMachine(TreeMachine):
    """Pages of four tokens."""

    page_size = 4


MACHINES = pytest.mark.parametrize("machine", [TreeMachine, PairMachine, QuadMachine])


@pytest.mark.slow
@MACHINES
def test_the_tree_agrees_with_a_page_table(machine: type[TreeMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=40))


@pytest.mark.soak
@MACHINES
def test_the_tree_agrees_with_a_page_table_for_long(
    machine: type[TreeMachine], is_full: bool
) -> None:
    num_runs = 3000 if is_full else 100
    run_state_machine_as_test(
        machine, settings=settings(max_examples=num_runs, stateful_step_count=100)
    )
