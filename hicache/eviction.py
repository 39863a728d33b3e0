"""Which pages leave a tier first.

A policy ranks nodes; an order keeps the nodes that may be evicted, lowest rank first, however
many there are: O(log n) to enter or to leave, nothing rebuilt per call.
"""

import operator
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

from hicache.tree import Node

Rank = Callable[[Node], Any]
"""Ranks a node; the lowest rank is evicted first, and equal ranks in the order of their puts."""

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

_RUN = 512
_SLACK = 64

_Entry = tuple[Any, int, Node]
"""The rank that a node had when it was put, the number of that put, and the node. Equal ranks go
in the order in which they were put: nodes change under the order, and must not be compared."""


class Placed(Protocol):
    """Has a place in one order."""

    entry: Any


class Placing(Protocol):
    """Returns where a node's place is written: its residence in a tier, or the node itself."""

    def __call__(self, node: Node, /) -> Placed: ...


class EvictionOrder:
    """Nodes that may be evicted from one tier, of all trees, lowest rank first.

    A node's place is written on its residence, so one residence can be in one order at a time.

    A list that is kept sorted, in runs of at most ``_RUN`` entries: to find a place takes a few
    comparisons, to make one moves a short run, and victims lie side by side. (A heap takes a new
    entry faster, but each victim sinks through all of it: from 1,000 to 50,000 leaves that took
    twice as long.) Places given up stay until they surface, or until they are more than half.
    """

    def __init__(self, rank: Rank, residence: Placing) -> None:
        self._rank = rank
        self._residence = residence
        self._runs: list[list[_Entry]] = []
        self._lasts: list[_Entry] = []
        """The last entry of each run."""
        self._num_entries = 0
        self._num_nodes = 0
        self._num_puts = 0

    def __len__(self) -> int:
        return self._num_nodes

    def put(self, node: Node) -> None:
        """Enter a node, or rank it anew. O(log n); O(1) if it goes last."""
        residence = self._residence(node)
        if residence.entry is None:
            self._num_nodes += 1
        self._num_puts += 1
        residence.entry = entry = (self._rank(node), self._num_puts, node)
        self._num_entries += 1
        if self._lasts and entry < self._lasts[-1]:
            index = bisect_left(self._lasts, entry)
            run = self._runs[index]
            insort(run, entry)
        else:
            if not self._runs:
                self._runs.append([])
                self._lasts.append(entry)
            index = len(self._runs) - 1
            run = self._runs[index]
            run.append(entry)
            self._lasts[index] = entry
        if len(run) > _RUN:
            half = len(run) // 2
            self._runs[index : index + 1] = run[:half], run[half:]
            self._lasts.insert(index, run[half - 1])
        self._tidy()

    def discard(self, node: Node) -> None:
        """Take a node out, if it is in. O(1), in the mean."""
        residence = self._residence(node)
        if residence.entry is not None:
            residence.entry = None
            self._num_nodes -= 1
            self._tidy()

    def first(self) -> Node | None:
        """Return the node to evict next, which stays in the order; None where there is none."""
        while self._runs:
            run = self._runs[0]
            node = run[0][2]
            if self._residence(node).entry is run[0]:
                return node
            del run[0]
            self._num_entries -= 1
            if not run:
                del self._runs[0], self._lasts[0]
        return None

    def nodes(self) -> list[Node]:
        """Return the nodes, next victim first. O(n): for looking, not for evicting."""
        return [node for _, _, node in self._live()]

    def check(self) -> None:
        """Assert that entries are sorted, and that every node counted has exactly one."""
        entries = [entry for run in self._runs for entry in run]
        assert len(entries) == self._num_entries
        assert all(not later < entry for entry, later in pairwise(entries))
        assert all(0 < len(run) <= _RUN for run in self._runs)
        assert self._lasts == [run[-1] for run in self._runs]
        live = self._live()
        assert len({id(node) for _, _, node in live}) == len(live) == self._num_nodes

    def _tidy(self) -> None:
        """Drop the places given up when they are more than half: O(1) a call, in the mean."""
        if self._num_entries > 2 * self._num_nodes + _SLACK:
            live = self._live()
            self._num_entries = len(live)
            self._runs = [live[start : start + _RUN] for start in range(0, len(live), _RUN)]
            self._lasts = [run[-1] for run in self._runs]

    def _live(self) -> list[_Entry]:
        residence = self._residence
        return [entry for run in self._runs for entry in run if residence(entry[2]).entry is entry]
