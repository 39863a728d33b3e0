"""Which pages leave a tier first.

A policy ranks nodes; an order keeps the nodes that may be evicted, lowest rank first, however
many there are: O(log n) to enter or to leave, nothing rebuilt per call.
"""

import operator
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from hicache.tree import Node, Residence

Rank = Callable[[Node], Any]
"""Ranks a node; the lowest rank is evicted first. Equal ranks fall back on ``Node.__lt__``."""

POLICIES: dict[str, Rank] = {
    "lru": operator.attrgetter("last_used"),
    "lfu": operator.attrgetter("uses", "last_used"),
    "fifo": operator.attrgetter("created"),
    "mru": lambda node: -node.last_used,
    "filo": lambda node: -node.created,
    "slru": lambda node: (node.uses > 1, node.last_used),
    "priority": operator.attrgetter("priority", "last_used"),
}
"""By name. slru: what was used once goes before what was used again, each part by lru."""

_SLACK = 64


class Tiered(Protocol):
    """Returns a node's residence in one tier."""

    def __call__(self, node: Node, /) -> Residence: ...


class EvictionOrder:
    """Nodes that may be evicted from one tier, of all trees, lowest rank first.

    A node's place is written on its residence, so one residence can be in one order at a time.
    A heap with lazy deletion: places given up stay in it until they surface, or until they are
    more than the places in use. ``check`` asserts that no node is lost.
    """

    def __init__(self, rank: Rank, residence: Tiered) -> None:
        self._rank = rank
        self._residence = residence
        self._heap: list[tuple[Any, Node]] = []
        self._num_nodes = 0

    def __len__(self) -> int:
        return self._num_nodes

    def put(self, node: Node) -> None:
        """Enter a node, or rank it anew."""
        residence = self._residence(node)
        if residence.entry is None:
            self._num_nodes += 1
        residence.entry = entry = (self._rank(node), node)
        heappush(self._heap, entry)
        self._tidy()

    def discard(self, node: Node) -> None:
        """Take a node out, if it is in."""
        residence = self._residence(node)
        if residence.entry is not None:
            residence.entry = None
            self._num_nodes -= 1
            self._tidy()

    def first(self) -> Node | None:
        """Return the node to evict next, which stays in the order; None where there is none."""
        heap, residence = self._heap, self._residence
        while heap:
            node = heap[0][1]
            if residence(node).entry is heap[0]:
                return node
            heappop(heap)
        return None

    def nodes(self) -> list[Node]:
        """Return the nodes, next victim first. O(n log n): for looking, not for evicting."""
        return [node for _, node in sorted(e for e in self._heap if self._is_live(e))]

    def check(self) -> None:
        """Assert that every node counted is in the heap exactly once."""
        live = [entry for entry in self._heap if self._is_live(entry)]
        assert len(live) == self._num_nodes
        assert len({id(node) for _, node in live}) == len(live)

    def _tidy(self) -> None:
        """Drop the places given up when they are more than half: O(1) a call, in the mean."""
        if len(self._heap) > 2 * self._num_nodes + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def _is_live(self, entry: tuple[Any, Node]) -> bool:
        return self._residence(entry[1]).entry is entry
