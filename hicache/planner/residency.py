"""Who has which slot: the trees, the pools' slots, the eviction orders, the operations.

The rest of the planner says what it wants in L1 or L2; this module finds the room and keeps the
books. Invariants, asserted by ``check`` beside those of the trees:

1. Per pool, over all trees: free + in a tree (resident, incoming) + detached + orphans of
   operations + private to requests = capacity, counted from what is.
2. A copy that is held, leased or incoming is in no eviction order; every other is, if it is a
   leaf of its tier, or redundant in L2.
3. Holds on a copy are exactly those of the live operations and prefetches.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hicache.actions import Action, BackUp, Fact, Tier
from hicache.allocator import SlotAllocator
from hicache.events import OpId, RequestId
from hicache.eviction import EvictionOrder, Rank
from hicache.keys import KEY_NBYTES, NamespaceDigest, chain
from hicache.planner.operations import TARGET, Kind, Operation, Prefetch, Span, residence
from hicache.prefetch import PrefetchPolicy
from hicache.tree import NO_CHILDREN, NO_SLOTS, Claim, HiRadixTree, Node
from hicache.writing import WritePolicy

GHOST_NBYTES = 12
"""Of a page key, kept to remember an evicted page."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """What the planner must know of the world."""

    page_size: int
    page_nbytes: int
    """Bytes of KV a page."""
    device_pages: int
    host_pages: int
    """0 where there is no L2."""
    has_storage: bool
    device_rank: Rank
    host_rank: Rank
    writing: WritePolicy
    prefetch: PrefetchPolicy
    low_water_pages: int = 0
    """L1 pages to keep free by demoting ahead of need."""
    batch_pages: int = 128
    """Pages of one fetch or store."""
    touch_interval_s: float = 60.0
    miss_memory_s: float = 5.0
    """How long a page that storage did not have is not asked for again."""
    num_ghosts: int = 1_000_000
    """Evicted pages that are remembered, so that misses can be explained."""
    prefill_tokens_per_s: float | None = None
    """Seed of the measured rate."""


class Residency:
    """The books. Changed by the planner's parts, which share it."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self.now = 0.0
        self.trees: dict[NamespaceDigest, HiRadixTree] = {}
        self.tree_users: Counter[NamespaceDigest] = Counter()
        """Requests that refer to a tree."""
        self.device_slots = SlotAllocator(config.device_pages)
        self.host_slots = SlotAllocator(config.host_pages)
        self.device_order = EvictionOrder(config.device_rank, lambda node: node.device)
        self.host_order = EvictionOrder(self._host_rank, lambda node: node.host)
        self.operations: dict[OpId, Operation] = {}
        self.demotions: set[Operation] = set()
        self.detached: set[Node] = set()
        """Nodes outside every tree whose host pages are still held or arriving."""
        self.kept: set[Node] = set()
        self.skipped: set[Node] = set()
        """Nodes that L2 keeps for the sake of what is below them, for now."""
        self.ghosts: OrderedDict[bytes, tuple[Tier, float]] = OrderedDict()
        self.actions: list[Action] = []
        self.facts: list[Fact] = []
        self.is_storage_up = config.has_storage
        self.release_prefetches: Callable[[], bool] = lambda: False
        """Gives up what waiting requests hold in L1; whether that freed anything."""
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

    def set_pages(
        self, node: Node, tier: Tier, slots: "array[int]", incoming: "array[int]" = NO_SLOTS
    ) -> None:
        """Say which pages of a node are in a tier, and keep all counts and orders in step."""
        where = residence(node, tier)
        had_pages = where.num_pages > 0
        where.slots, where.incoming = slots or NO_SLOTS, incoming or NO_SLOTS
        has_pages = where.num_pages > 0
        parent = node.parent
        if parent is not None and had_pages != has_pages:
            residence(parent, tier).children += has_pages - had_pages
            self.refresh(parent)
        self.refresh(node)

    def refresh(self, node: Node) -> None:
        """Enter a node in the eviction orders, or take it out, as it now deserves. O(log n)."""
        is_free = node.parent is not None and node not in self.kept
        device, host = node.device, node.host
        if (
            is_free
            and device.slots
            and not (node.leases or device.holds or device.children or device.incoming)
        ):
            if device.entry is None or device.entry[0] != self.config.device_rank(node):
                self.device_order.put(node)
        elif device.entry is not None:
            self.device_order.discard(node)
        if (
            is_free
            and host.slots
            and not (host.holds or host.incoming)
            and (not host.children or self._is_redundant(node))
        ):
            if host.entry is None or host.entry[0] != self._host_rank(node):
                self.host_order.put(node)
        elif host.entry is not None:
            self.host_order.discard(node)

    def merge_up(self, node: Node) -> Node:
        """Join a node with the neighbours above it that differ in nothing; return what it is in."""
        tree, run = node.tree, [node]
        while (
            (above := run[-1].parent) is not None
            and tree.is_mergeable(run[-1])
            and not (self.is_pinned(run[-1]) or self.is_pinned(above))
        ):
            run.append(above)
        if len(run) == 1:
            return node
        run.reverse()
        for part in run[:-1]:
            self.device_order.discard(part)
            self.host_order.discard(part)
            self.kept.discard(part)
            self.skipped.discard(part)
        merged = tree.merge(run)
        self.refresh(merged)
        return merged

    def _on_split(self, upper: Node, lower: Node) -> None:
        if lower in self.kept:
            self.kept.add(upper)
        self.refresh(upper)
        self.refresh(lower)

    def _is_redundant(self, node: Node) -> bool:
        """Whether L2 only repeats what L1 has, and L3 too (or the policy keeps no such copies)."""
        num_pages = len(node.host.slots)
        if len(node.device.slots) < num_pages:
            return False
        return node.stored >= num_pages or not self.config.writing.keeps_copies_of_l1

    def _host_rank(self, node: Node) -> tuple[bool, Any]:
        return (not self._is_redundant(node), self.config.host_rank(node))

    # ------------------------------------------------------------ claims and operations

    def hold(self, node: Node, tier: Tier, claim: Operation | Prefetch) -> None:
        """Let a claim hold a node's copy in a tier: none of it is freed until it is let go."""
        residence(node, tier).holds += 1
        if isinstance(claim, Operation):
            claim.held.append(node)
        else:
            claim.held.append((node, tier))
        self.claim(node, claim)
        self.refresh(node)

    def claim(self, node: Node, claim: Claim) -> None:
        """File a claim with a node, so that it follows when the node splits."""
        if claim not in node.claims:
            node.claims = (*node.claims, claim)

    def unclaim(self, node: Node, claim: Claim) -> None:
        """Take a claim off a node that it no longer covers."""
        if not claim.covers(node):
            node.claims = tuple(other for other in node.claims if other is not claim)
        self._let_go_if_detached(node)
        self.refresh(node)

    def begin(self, kind: Kind, num_pages: int, request: RequestId | None = None) -> Operation:
        """Return a new operation; its end is to be reported by its id."""
        self._num_operations += 1
        op = Operation(OpId(self._num_operations), kind, self.now, request=request)
        op.num_pages, op.held_tier = num_pages, "device" if kind == "back_up" else "host"
        self.operations[op.id] = op
        return op

    def bring(self, op: Operation, node: Node, slots: "array[int]") -> None:
        """Say that an operation brings pages to a node, behind those in its target tier."""
        tier = TARGET[op.kind]
        where = residence(node, tier)
        assert not where.incoming
        op.spans.append(Span(node, len(slots)))
        self.claim(node, op)
        self.set_pages(node, tier, where.slots, slots)

    def release_holds(self, op: Operation) -> None:
        """End what an operation holds; it has really ended."""
        held, op.held = op.held, []
        for node in held:
            residence(node, op.held_tier).holds -= 1
            self.unclaim(node, op)

    def arrived(self, op: Operation, outcomes: list[bool]) -> list[tuple[Node, int, int]]:
        """Make the pages that have arrived resident, up to the first failure in each node.

        Returns (node, pages arrived, pages expected) of each span. The slots of the rest become
        the operation's orphans, which the caller frees when it has really ended.
        """
        tier, done, results = TARGET[op.kind], 0, []
        spans, op.spans = op.spans, []
        for span in spans:
            node, mine = span.node, outcomes[done : done + span.num_pages]
            done += span.num_pages
            if node is None:
                continue
            good = mine.index(False) if False in mine else len(mine)
            where = residence(node, tier)
            assert len(where.incoming) == span.num_pages
            op.orphans += where.incoming[good:]
            self.set_pages(node, tier, where.slots + where.incoming[:good])
            self.unclaim(node, op)
            results.append((node, good, span.num_pages))
        return results

    def end(self, op: Operation) -> None:
        """Forget an operation that has really ended; its holds and orphans are free."""
        self.release_holds(op)
        slots = self.device_slots if TARGET[op.kind] == "device" else self.host_slots
        slots.free(op.orphans)
        op.orphans = array("i")
        self.demotions.discard(op)
        while self.skipped:
            self.refresh(self.skipped.pop())
        del self.operations[op.id]

    # ------------------------------------------------------------ room in L1

    def take_device(self, num_pages: int) -> "array[int] | None":
        """Return free L1 slots, evicting what may be evicted; None if there are not enough now.

        Pages that L2 has too go at once. Others are copied there first, which frees them only when
        the copy is done: then ``coming`` says how many slots there will be.
        """
        self._make_room(num_pages)
        slots = self.device_slots.allocate(num_pages)
        if slots is None and self.coming < num_pages and self.release_prefetches():
            self._make_room(num_pages)
            slots = self.device_slots.allocate(num_pages)
        return slots

    @property
    def coming(self) -> int:
        """L1 slots that are free, or will be when the demotions under way are done."""
        return self.device_slots.num_free + sum(op.num_pages for op in self.demotions)

    def demote_ahead(self) -> None:
        """Keep the low-water mark of free L1 pages, where evicting would need a copy."""
        while self.coming < self.config.low_water_pages:
            victim = self.device_order.first()
            if victim is None or self._has_copy(victim):
                return
            self._demote(victim, self.config.low_water_pages - self.coming)

    def _make_room(self, num_pages: int) -> None:
        while self.device_slots.num_free < num_pages and self.coming < num_pages:
            victim = self.device_order.first()
            if victim is None and self.kept:
                self.unkeep(list(self.kept))
                continue
            if victim is None:
                return
            wanted = min(len(victim.device.slots), num_pages - self.coming)
            if self._has_copy(victim):
                kind: Literal["demoted", "dropped"] = "demoted" if victim.host.slots else "dropped"
                self.trim_device(victim, wanted, kind, "room")
            else:
                self._demote(victim, wanted)

    def _has_copy(self, node: Node) -> bool:
        """Whether the L1 pages of a node may go at once: L2 has them, or there is no L2."""
        return len(node.host.slots) >= len(node.device.slots) or not self.config.host_pages

    def _demote(self, victim: Node, num_pages: int) -> None:
        """Copy trailing L1 pages of a victim to L2, then free them; drop them if L2 has no room."""
        resident, copied = len(victim.device.slots), len(victim.host.slots)
        num_pages = min(num_pages, resident - copied)
        if not victim.host.incoming:
            keep = resident - num_pages
            if keep and keep != copied:
                victim.tree.split(victim, keep)
            op = self.back_up(victim, len(victim.device.slots))
            if op is not None:
                op.is_demotion = True
                self.demotions.add(op)
                return
        reason = "busy" if victim.host.incoming else "host_full"
        kind: Literal["evicted", "dropped"] = (
            "evicted" if victim.stored >= len(victim.device.slots) else "dropped"
        )
        self.trim_device(victim, num_pages, kind, reason)

    def trim_device(
        self,
        node: Node,
        num_pages: int,
        kind: Literal["evicted", "demoted", "dropped"],
        reason: str,
    ) -> None:
        """Free trailing L1 pages of a node."""
        keep = len(node.device.slots) - num_pages
        freed = node.device.slots[keep:]
        self.set_pages(node, "device", node.device.slots[:keep])
        self.device_slots.free(freed)
        self.facts.append(Fact(kind, "device", reason, num_pages))
        self.settle(node, "device")

    # ------------------------------------------------------------ room in L2

    def take_host(self, num_pages: int) -> "array[int] | None":
        """Return free L2 slots, evicting what may be evicted; None if there are not enough."""
        while self.host_slots.num_free < num_pages:
            victim = self.host_order.first()
            if victim is None and self.kept:
                self.unkeep(list(self.kept))
                continue
            if victim is None:
                return None
            if not self._is_last_copy_needed(victim):
                self._evict_host(victim, num_pages - self.host_slots.num_free)
            else:
                self._skip(victim)
        return self.host_slots.allocate(num_pages)

    def _skip(self, node: Node) -> None:
        """Take a node out of the order until some operation has ended."""
        self.host_order.discard(node)
        self.skipped.add(node)

    def back_up(self, node: Node, num_pages: int) -> Operation | None:
        """Copy a node's L1 pages up to ``num_pages`` to L2; None if L2 has no room."""
        first = len(node.host.slots)
        assert not node.host.incoming
        assert first < num_pages <= len(node.device.slots)
        op = self.begin("back_up", num_pages - first)
        self.hold(node, "device", op)
        node.host.holds += 1  # its own leading pages must not make the room
        self.refresh(node)
        target = self.take_host(num_pages - first)
        node.host.holds -= 1
        self.refresh(node)
        if target is None:
            self.facts.append(Fact("dropped", "host", "host_full", num_pages - first))
            self.end(op)
            return None
        self.bring(op, node, target)
        self.actions.append(BackUp(op.id, node.device.slots[first:num_pages], target))
        return op

    def flush_host(self) -> None:
        """Empty L2 of all that may be evicted."""
        while (victim := self.host_order.first()) is not None:
            if self._is_last_copy_needed(victim):
                self._skip(victim)
            else:
                self._evict_host(victim, len(victim.host.slots))

    def drop_copies(self, node: Node) -> None:
        """Free what copies of a node may be freed, and let it leave the tree if that was all.

        To be called on descendants first. A node that is needed stays as it is.
        """
        device, host = node.device, node.host
        if device.slots and not (node.leases or device.holds or device.incoming or device.children):
            self.trim_device(node, len(device.slots), "dropped", "forgotten")
        if host.slots and not (host.holds or host.incoming or device.slots):
            freed = host.slots
            self.set_pages(node, "host", NO_SLOTS)
            self.host_slots.free(freed)
            self.facts.append(Fact("dropped", "host", "forgotten", len(freed)))
        self.settle(node, "host")

    def _evict_host(self, victim: Node, num_pages: int) -> None:
        num_pages = min(num_pages, len(victim.host.slots))
        keep = len(victim.host.slots) - num_pages
        has_copy = max(len(victim.device.slots), victim.stored) >= len(victim.host.slots)
        reason = "redundant" if len(victim.device.slots) > keep else "room"
        freed = victim.host.slots[keep:]
        self.set_pages(victim, "host", victim.host.slots[:keep])
        self.host_slots.free(freed)
        self.facts.append(Fact("evicted" if has_copy else "dropped", "host", reason, num_pages))
        self.settle(victim, "host")

    def _is_last_copy_needed(self, node: Node) -> bool:
        """Whether evicting from L2 would cut off descendants that are held or leased."""
        if not node.children or max(len(node.device.slots), node.stored) >= node.num_pages:
            return False
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            if below.leases or below.claims or below.device.num_pages:
                return True
            stack.extend(below.children.values())
        return False

    # ------------------------------------------------------------ what has no copy left

    def settle(self, node: Node, tier: Tier) -> None:
        """Let the pages leave the tree that are nowhere any more, with all below them.

        ``tier`` is where they were last, for the memory of evicted pages.
        """
        reach = max(node.device.num_pages, node.host.num_pages, node.stored + node.storing)
        if node.parent is None or reach == node.num_pages:
            self.refresh(node)
            return
        for child in list(node.children.values()):
            self.detach(child, tier)
        parent = node.parent
        if self.config.num_ghosts:
            node.key(node.num_pages - 1)
            self._remember(node, reach, tier)
        node.tree.shrink(node, reach)
        if reach == 0:
            for claim in node.claims:
                claim.on_detach(node)
            self._forget(node)
            self.refresh(parent)
            self.drop_if_empty(parent.tree)
        else:
            self.refresh(node)

    def detach(self, top: Node, tier: Tier) -> None:
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
            self._remember(node, 0, tier)
            node.parent, node.children, node.firsts = None, NO_CHILDREN, None
            node.stored = node.storing = 0
            self._forget(node)
            for claim in node.claims:
                claim.on_detach(node)
            self.detached.add(node)
            self._let_go_if_detached(node)

    def drop_if_empty(self, tree: HiRadixTree) -> None:
        """Forget a tree that has neither pages nor requests; whoever needs it makes it anew."""
        if not tree.root.children and not self.tree_users[tree.namespace]:
            self.trees.pop(tree.namespace, None)
            self.tree_users.pop(tree.namespace, None)

    def unkeep(self, nodes: list[Node]) -> None:
        """End the protection of nodes that were to be kept."""
        for node in nodes:
            self.kept.discard(node)
            node.kept_until = 0.0
            self.refresh(node)

    def ghost(self, parent: bytes, page: bytes) -> tuple[Tier, float] | None:
        """Return where and when a page was last evicted, if that is remembered.

        ``parent`` is the key of the page before, ``page`` its tokens.
        """
        (key,) = chain(parent, page, len(page))
        return self.ghosts.get(key[:GHOST_NBYTES])

    def _forget(self, node: Node) -> None:
        self.kept.discard(node)
        self.skipped.discard(node)
        self.device_order.discard(node)
        self.host_order.discard(node)

    def _let_go_if_detached(self, node: Node) -> None:
        if node not in self.detached or node.host.holds or node.host.incoming:
            return
        self.host_slots.free(node.host.slots)
        node.host.slots = NO_SLOTS
        self.detached.discard(node)

    def _remember(self, node: Node, first: int, tier: Tier) -> None:
        known = len(node.keys) // KEY_NBYTES
        for index in range(first, min(known, node.num_pages)):
            self.ghosts[node.key(index)[:GHOST_NBYTES]] = (tier, self.now)
        while len(self.ghosts) > self.config.num_ghosts:
            self.ghosts.popitem(last=False)

    # ------------------------------------------------------------ checking

    def check(self, prefetches: list[Prefetch], private: int) -> None:
        """Assert the invariants. ``private`` counts the L1 slots that only requests have."""
        device, host = private, 0
        holds: Counter[tuple[int, Tier]] = Counter()
        for op in self.operations.values():
            orphans = len(op.orphans)
            device, host = (
                (device + orphans, host)
                if TARGET[op.kind] == "device"
                else (device, host + orphans)
            )
            holds.update((id(node), op.held_tier) for node in op.held)
        for prefetch in prefetches:
            holds.update((id(node), tier) for node, tier in prefetch.held)
        for tree in self.trees.values():
            tree.check()
            for node in tree.nodes():
                device += node.device.num_pages
                host += node.host.num_pages
                assert node.device.holds == holds.pop((id(node), "device"), 0), node
                assert node.host.holds == holds.pop((id(node), "host"), 0), node
                self._check_orders(node)
        for node in self.detached:
            host += node.host.num_pages
            assert node.host.holds == holds.pop((id(node), "host"), 0)
        assert not holds, "a hold on a node that is nowhere"
        assert device + self.device_slots.num_free == self.config.device_pages
        assert host + self.host_slots.num_free == self.config.host_pages
        for part in (self.device_slots, self.host_slots, self.device_order, self.host_order):
            part.check()

    def _check_orders(self, node: Node) -> None:
        device, host = node.device.entry, node.host.entry
        self.refresh(node)
        assert node.device.entry is device, f"stale in the order of L1: {node}"
        assert node.host.entry is host or node in self.skipped, f"stale in that of L2: {node}"
