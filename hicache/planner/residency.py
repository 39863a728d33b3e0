"""The books: trees, slots, eviction orders, operations, and what claims what.

The rest of the planner decides; this module keeps what follows from a decision in step.
Invariants, asserted by ``check`` beside those of the trees:

1. Per pool, over all trees: free + in a tree (resident, incoming) + detached + orphans of
   operations + private to requests = capacity, counted from what is.
2. Every copy has its places in the orders, and no other (``Orders``).
3. Holds on a copy are exactly those of the live operations and prefetches.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable

from hicache.actions import Action, Fact, Tier
from hicache.events import OpId, RequestId
from hicache.keys import NamespaceDigest
from hicache.planner.config import PlannerConfig
from hicache.planner.ghosts import Cause, Ghosts
from hicache.planner.operations import TARGET, Kind, Operation, Prefetch, Span, residence
from hicache.planner.orders import Orders
from hicache.tree import NO_CHILDREN, NO_SLOTS, Claim, HiRadixTree, Node


class Residency:
    """Who has which slot. Changed by the planner's parts, which share it."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self.now = 0.0
        self.trees: dict[NamespaceDigest, HiRadixTree] = {}
        self.tree_users: Counter[NamespaceDigest] = Counter()
        """Requests that refer to a tree."""
        self.device_slots = config.slots(config.device_pages)
        self.host_slots = config.slots(config.host_pages)
        self.orders = orders = Orders(config)
        self.refresh: Callable[[Node], None] = orders.refresh
        """Has a node placed anew in the eviction orders before the next victim is chosen."""
        self.operations: dict[OpId, Operation] = {}
        self.demotions: dict[Operation, None] = {}
        """Back-ups after which the L1 pages are freed."""
        self.num_demoting = 0
        """Pages of those."""
        self.detached: set[Node] = set()
        """Nodes outside every tree whose host pages are still held or arriving."""
        self.ghosts = Ghosts(config)
        self.actions: list[Action] = []
        self.facts: list[Fact] = []
        self.is_storage_up = config.has_storage
        self.is_pinned: Callable[[Node], bool] = lambda node: False
        """Whether somebody keeps a reference to a node that a merge would break."""
        self._num_operations = 0

    # ------------------------------------------------------------ trees

    def tree(self, namespace: NamespaceDigest) -> HiRadixTree:
        """Return the tree of a namespace, a new one where there is none."""
        tree = self.trees.get(namespace)
        if tree is None:
            tree = HiRadixTree(namespace, self.config.page_size, self._on_split)
            self.trees[namespace] = tree
        return tree

    def drop_if_empty(self, tree: HiRadixTree) -> None:
        """Forget a tree that has neither pages nor requests; whoever needs it makes it anew."""
        if not tree.root.children and not self.tree_users[tree.namespace]:
            self.trees.pop(tree.namespace, None)
            self.tree_users.pop(tree.namespace, None)

    def set_pages(
        self, node: Node, tier: Tier, slots: "array[int]", incoming: "array[int]" = NO_SLOTS
    ) -> None:
        """Say which pages of a node are in a tier, and keep all counts and orders in step."""
        where = node.device if tier == "device" else node.host
        had_pages = bool(where.slots or where.incoming)
        where.slots, where.incoming = slots or NO_SLOTS, incoming or NO_SLOTS
        has_pages = bool(slots or incoming)
        parent = node.parent
        if parent is not None and had_pages != has_pages:
            residence(parent, tier).children += has_pages - had_pages
            self.refresh(parent)
        self.refresh(node)

    def lease(self, path: Iterable[Node], change: int) -> None:
        """Add to the leases of all nodes of a path."""
        for node in path:
            node.leases += change
            self.refresh(node)

    def forget_beliefs(self) -> None:
        """Forget the oldest beliefs beyond ``max_beliefs``, from the tails of branches on."""
        while (node := self.orders.excess_belief()) is not None:
            node.stored = 0
            self.settle(node, "storage")

    def merge_up(self, node: Node) -> None:
        """Join a node with the neighbours above it that differ in nothing; it stays, they go."""
        run = [node]
        while (above := run[-1].parent) is not None and self._is_mergeable(run[-1], above):
            run.append(above)
        if len(run) == 1:
            return
        run.reverse()
        for part in run[:-1]:
            self.orders.forget(part)
        self.refresh(node.tree.merge(run))

    def merge_around(self, node: Node) -> None:
        """Join a node that no request uses with its neighbours, where they differ in nothing."""
        if len(node.children) == 1:
            (below,) = node.children.values()
            node = below if self._is_mergeable(below, node) else node
        if not node.leases:
            self.merge_up(node)

    def unkeep(self, nodes: Iterable[Node]) -> None:
        """End the protection of nodes that were to be kept."""
        for node in nodes:
            self.orders.kept.pop(node, None)
            node.kept_until = 0.0
            self.refresh(node)

    def _is_mergeable(self, lower: Node, upper: Node) -> bool:
        return (
            upper.tree.is_mergeable(lower)
            and self._is_used_enough(lower) == self._is_used_enough(upper)
            and not (self.is_pinned(lower) or self.is_pinned(upper))
        )

    def _is_used_enough(self, node: Node) -> tuple[bool, bool]:
        """Whether it may be written to L2, and to L3, as far as that depends on who used it."""
        config = self.config
        return config.writing.is_due(node), node.users >= config.min_store_users

    def _on_split(self, upper: Node, lower: Node) -> None:
        if lower in self.orders.kept:
            self.orders.kept[upper] = None
        self.refresh(upper)
        self.refresh(lower)

    # ------------------------------------------------------------ pages that are nowhere

    def settle(self, node: Node, cause: Cause) -> None:
        """Let the pages leave the tree that are nowhere any more, with all below them."""
        device, host, parent, num_pages = node.device, node.host, node.parent, node.num_pages
        if parent is None or num_pages in (len(device.slots), len(host.slots), node.stored):
            self.refresh(node)
            return
        reach = max(device.num_pages, host.num_pages, node.stored + node.storing)
        if reach == num_pages:
            self.refresh(node)
            return
        for child in list(node.children.values()):
            self._detach(child, cause)
        if self.config.num_ghosts:
            node.key(node.num_pages - 1)
            self.ghosts.remember(node, reach, cause)
        node.tree.shrink(node, reach)
        if reach:
            self.refresh(node)
            return
        for claim in node.claims:
            claim.on_detach(node)
        self.orders.forget(node)
        self.refresh(parent)
        self.drop_if_empty(parent.tree)

    def _detach(self, top: Node, cause: Cause) -> None:
        """Take a node and all below it out of the tree; held host pages are freed later."""
        parent = top.parent
        assert parent is not None
        top.tree.remove(top)
        self.refresh(parent)
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            assert not node.leases
            assert not node.device.num_pages
            self.ghosts.remember(node, 0, cause)
            node.parent, node.children, node.firsts = None, NO_CHILDREN, None
            node.stored = node.storing = 0
            self.orders.forget(node)
            for claim in node.claims:
                claim.on_detach(node)
            self.detached.add(node)
            self._free_if_detached(node)

    def _free_if_detached(self, node: Node) -> None:
        if node not in self.detached or node.host.holds or node.host.incoming:
            return
        self.host_slots.free(node.host.slots)
        node.host.slots = NO_SLOTS
        self.detached.discard(node)

    # ------------------------------------------------------------ claims and operations

    def hold(self, node: Node, tier: Tier, claim: Operation | Prefetch) -> None:
        """Let a claim hold a node's copy in a tier: none of it is freed until it is let go."""
        residence(node, tier).holds += 1
        if isinstance(claim, Operation):
            claim.held[node] = None
        else:
            claim.held.append((node, tier))
        self._claim(node, claim)
        self.refresh(node)

    def pin(self, nodes: Iterable[Node], change: int) -> None:
        """Hold the host copies of nodes, or let them go, while room is made for something else."""
        for node in nodes:
            node.host.holds += change
            self.refresh(node)

    def unclaim(self, node: Node, claim: Claim) -> None:
        """Take a claim off a node, unless it still covers it."""
        if claim in node.claims and not claim.covers(node):
            index = node.claims.index(claim)  # many may wait below one system prompt
            node.claims = node.claims[:index] + node.claims[index + 1 :]
        self._free_if_detached(node)
        self.refresh(node)

    def begin(self, kind: Kind, num_pages: int, request: RequestId | None = None) -> Operation:
        """Return a new operation; its end is to be reported by its id."""
        self._num_operations += 1
        op = Operation(OpId(self._num_operations), kind, self.now, num_pages, request)
        op.held_tier = "device" if kind == "back_up" else "host"
        self.operations[op.id] = op
        return op

    def demote(self, op: Operation) -> None:
        """Note that the L1 pages of a back-up are to be freed when it has ended."""
        self.demotions[op] = None
        self.num_demoting += op.num_pages

    def bring(self, op: Operation, node: Node, slots: "array[int]") -> None:
        """Say that an operation brings pages to a node, behind those in its target tier."""
        tier = TARGET[op.kind]
        where = residence(node, tier)
        assert not where.incoming
        op.spans.append(Span(node, len(slots)))
        self._claim(node, op)
        self.set_pages(node, tier, where.slots, slots)

    def arrived(self, op: Operation, outcomes: list[bool]) -> list[tuple[Node, int, int]]:
        """Make the pages that have arrived resident, up to the first failure in each node.

        Returns (node, pages arrived, pages expected) of each span. The slots of the rest become
        the operation's orphans, which are freed when it has really ended.
        """
        tier, done, results = TARGET[op.kind], 0, []
        spans, op.spans = op.spans, []
        for span in spans:
            node, mine = span.node, outcomes[done : done + span.num_pages]
            done += span.num_pages
            if node is None:
                continue
            good = leading(mine)
            where = residence(node, tier)
            assert len(where.incoming) == span.num_pages
            op.orphans += where.incoming[good:]
            self.set_pages(node, tier, where.slots + where.incoming[:good])
            self.unclaim(node, op)
            results.append((node, good, span.num_pages))
        return results

    def release_holds(self, op: Operation) -> None:
        """End what an operation holds; it has really ended."""
        held, op.held = op.held, {}
        for node in held:
            residence(node, op.held_tier).holds -= 1
            self.unclaim(node, op)

    def end(self, op: Operation) -> None:
        """Forget an operation that has really ended; its holds and orphans are free."""
        self.release_holds(op)
        slots = self.device_slots if TARGET[op.kind] == "device" else self.host_slots
        slots.free(op.orphans)
        if op in self.demotions:
            del self.demotions[op]
            self.num_demoting -= op.num_pages
        self.orders.end_skips()
        del self.operations[op.id]

    def _claim(self, node: Node, claim: Claim) -> None:
        if claim not in node.claims:
            node.claims = (*node.claims, claim)

    # ------------------------------------------------------------ checking

    def check(self, prefetches: Iterable[Prefetch], private: int) -> None:
        """Assert the invariants. ``private`` counts the L1 slots that only requests have."""
        counts: Counter[str] = Counter(device=private)
        holds: Counter[tuple[int, Tier]] = Counter()
        for op in self.operations.values():
            counts[TARGET[op.kind]] += len(op.orphans)
            holds.update((id(node), op.held_tier) for node in op.held)
        for prefetch in prefetches:
            holds.update((id(node), tier) for node, tier in prefetch.held)
        self.orders.check()
        for tree in self.trees.values():
            tree.check()
            for node in tree.nodes():
                counts["device"] += node.device.num_pages
                counts["host"] += node.host.num_pages
                assert node.device.holds == holds.pop((id(node), "device"), 0), node
                assert node.host.holds == holds.pop((id(node), "host"), 0), node
                self.orders.check_node(node)
                assert node.parent is not None
                assert node.parent.is_root or node.users <= node.parent.users, node
        for node in self.detached:
            counts["host"] += node.host.num_pages
            assert node.host.holds == holds.pop((id(node), "host"), 0)
        assert not holds, "a hold on a node that is nowhere"
        assert counts["device"] + self.device_slots.num_free == self.config.device_pages
        assert counts["host"] + self.host_slots.num_free == self.config.host_pages
        assert self.num_demoting == sum(op.num_pages for op in self.demotions)
        self.device_slots.check()
        self.host_slots.check()


def leading(outcomes: list[bool]) -> int:
    """Return how many outcomes are good before the first that is not."""
    return outcomes.index(False) if False in outcomes else len(outcomes)
