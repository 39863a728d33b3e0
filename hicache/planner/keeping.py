"""Prefixes that an operator wants to stay in L1 or L2 until a time, as far as space allows."""

import math

from hicache.planner.residency import Residency
from hicache.tree import Node

MAX_KEPT = 0.5
"""Share of L1, and of L2, that may be kept. Under need all of it is given up."""


class Keeping:
    """The part of the planner that protects prefixes from eviction for a while."""

    def __init__(self, residency: Residency) -> None:
        self._books = residency
        self._config = residency.config
        self._earliest = math.inf
        """No node is kept to an earlier time; there may be none to this one."""

    def keep(self, path: list[Node], until: float) -> None:
        """Keep the nodes of a path, from the top, until the share is used up."""
        books = self._books
        kept = [*books.orders.kept]
        device = int(self._config.device_pages * MAX_KEPT) - sum(n.device.num_pages for n in kept)
        host = int(self._config.host_pages * MAX_KEPT) - sum(n.host.num_pages for n in kept)
        for node in path:
            if node not in books.orders.kept:
                device -= node.device.num_pages
                host -= node.host.num_pages
            if min(device, host) < 0 or not node.device.num_pages + node.host.num_pages:
                return
            node.kept_until = max(node.kept_until, until)
            books.orders.kept[node] = None
            books.refresh(node)
            self._earliest = min(self._earliest, until)

    def expire(self) -> None:
        """End what is over. O(1) until something may be."""
        books = self._books
        if self._earliest <= books.now:
            books.unkeep([node for node in books.orders.kept if node.kept_until <= books.now])
            self._earliest = min((node.kept_until for node in books.orders.kept), default=math.inf)

    def next_deadline(self) -> float:
        """Return when something may be over; infinity where nothing is kept."""
        return self._earliest
