"""Who leaves L1, L2, and what is known of L3, next.

A node changes many times in one event, and its places matter only when a victim is chosen: so a
changed node is noted, and placed before the next choice.
"""

from typing import Any

from hicache.eviction import POLICIES, EvictionOrder
from hicache.planner.config import PlannerConfig
from hicache.tree import Node

_MAX_STALE = 32
"""Nodes whose places may be put off from one event to the next: no event is to pay for many."""


class Orders:
    """The eviction orders of L1 and L2, and the order in which beliefs are forgotten.

    A copy that is held, leased, kept or incoming is in no order; every other is, if it is a leaf
    of its tier, or redundant in L2.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self.kept: dict[Node, None] = {}
        """Nodes that an operator wants to stay in L1 or L2."""
        self.skipped: dict[Node, None] = {}
        """Nodes that L2 keeps for the sake of what is below them, for now."""
        self._config = config
        self._device = EvictionOrder(config.device_rank, lambda node: node.device)
        self._host = EvictionOrder(self._host_rank, lambda node: node.host)
        self._beliefs = EvictionOrder(POLICIES["lru"], lambda node: node)
        self._stale: dict[Node, None] = {}

    def refresh(self, node: Node) -> None:
        """Have a node placed anew before the next victim is chosen. O(1)."""
        self._stale[node] = None

    def device_victim(self) -> Node | None:
        """Return the node that L1 gives up next, which stays in the order, if there is one."""
        self._place_stale()
        return self._device.first()

    def host_victim(self) -> Node | None:
        """Return the node that L2 gives up next, which stays in the order, if there is one."""
        self._place_stale()
        return self._host.first()

    def excess_belief(self) -> Node | None:
        """Return the belief to forget next, if there are more than ``max_beliefs``."""
        most = self._config.max_beliefs
        if len(self._stale) > _MAX_STALE or len(self._beliefs) + len(self._stale) > most:
            self._place_stale()
        return self._beliefs.first() if len(self._beliefs) > most else None

    def skip(self, node: Node) -> None:
        """Keep a node in L2 until ``end_skips``."""
        self._host.discard(node)
        self.skipped[node] = None

    def end_skips(self) -> None:
        """Let all that was skipped be chosen again."""
        while self.skipped:
            self.refresh(self.skipped.popitem()[0])

    def forget(self, node: Node) -> None:
        """Know nothing of a node any more."""
        self.kept.pop(node, None)
        self.skipped.pop(node, None)
        self._stale.pop(node, None)
        self._device.discard(node)
        self._host.discard(node)
        self._beliefs.discard(node)

    def is_redundant(self, node: Node) -> bool:
        """Whether leading pages of L2 only repeat L1 and L3, or L1 where no copies are wanted."""
        num_pages = min(len(node.device.slots), len(node.host.slots))
        return num_pages > 0 and (
            node.stored >= num_pages or not self._config.writing.keeps_copies_of_l1
        )

    # ------------------------------------------------------------ places

    def _place_stale(self) -> None:
        for node in self._stale:
            self._place(node)
        self._stale.clear()

    def _place(self, node: Node) -> None:
        """Enter a node in the orders, or take it out, as it now deserves. O(log n)."""
        is_free = node.parent is not None and not (self.kept and node in self.kept)
        device, host = node.device, node.host
        if (
            is_free
            and device.slots
            and not (node.leases or device.holds or device.children or device.incoming)
        ):
            if device.entry is None or device.entry[0] != self._config.device_rank(node):
                self._device.put(node)
        elif device.entry is not None:
            self._device.discard(node)
        if (
            is_free
            and host.slots
            and not (host.holds or host.incoming)
            and (not host.children or self.is_redundant(node))
        ):
            if host.entry is None or host.entry[0] != self._host_rank(node):
                self._host.put(node)
        elif host.entry is not None:
            self._host.discard(node)
        if is_free and _is_belief(node):
            if node.entry is None or node.entry[0] != node.last_used:
                self._beliefs.put(node)
        elif node.entry is not None:
            self._beliefs.discard(node)

    def _host_rank(self, node: Node) -> tuple[bool, Any]:
        return (not self.is_redundant(node), self._config.host_rank(node))

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Assert that every order is sound, once all nodes are placed."""
        self._place_stale()
        for order in (self._device, self._host, self._beliefs):
            order.check()

    def check_node(self, node: Node) -> None:
        """Assert that a node has the places that it deserves, after ``check``."""
        device, host = node.device.entry, node.host.entry
        is_listed = node.entry is not None or node in self.kept
        assert is_listed or not _is_belief(node), f"never forgotten: {node}"
        self._place(node)
        assert node.device.entry is device, f"stale in the order of L1: {node}"
        assert node.host.entry is host or node in self.skipped, f"stale in that of L2: {node}"


def _is_belief(node: Node) -> bool:
    """Whether a node is known for what L3 has of it alone, and leads nowhere else."""
    device, host = node.device, node.host
    return not (
        node.children
        or node.claims
        or device.slots
        or host.slots
        or device.incoming
        or host.incoming
    )
