"""Committing: computed pages enter the tree, where every request can find them.

A copy that is there or on its way is never replaced: the request keeps its own slot until its
release. Pages behind a copy that is still on its way wait for it.
"""

from hicache.keys import KEY_NBYTES, chain
from hicache.planner.requests import Request
from hicache.planner.residency import Residency
from hicache.planner.writes import Writes
from hicache.tree import Node

MAX_GROWN_PAGES = 64
"""A node is copied when it grows; beyond this length a new one begins, and release joins them."""


class Committing:
    """The part of the planner that shares what requests have computed."""

    def __init__(self, residency: Residency, writes: Writes) -> None:
        self._books = residency
        self._writes = writes

    def commit(self, request: Request, tokens: bytes) -> None:
        """Put computed pages in the tree, behind the request's lease, as far as the way is clear.

        O(new pages), whatever the request has and the tree holds.
        """
        request.uncommitted += tokens
        assert len(request.uncommitted) % request.tree.page_nbytes == 0
        while request.uncommitted:
            node = self._next(request)
            if node is None:
                return
            request.lease, request.committed = node, node.end
            self._count(request, node)

    def _next(self, request: Request) -> Node | None:
        """Lease one more node for the pages to commit; None where one is still on its way."""
        tree, tokens, top = request.tree, request.uncommitted, request.lease
        assert top is not None
        child = top.children.get(tokens[: tree.page_nbytes])
        if child is None:
            return self._append(request, top, tokens)
        if child.device.incoming:
            return None
        if not tokens.startswith(child.tokens):
            child = tree.locate(tokens, top)
            assert child.parent is top
        request.uncommitted = tokens[len(child.tokens) :]
        first, resident = request.committed, len(child.device.slots)
        request.duplicates.update(range(first, first + resident))
        if resident < child.num_pages:
            mine = request.slots[first + resident : first + child.num_pages]
            self._books.set_pages(child, "device", child.device.slots + mine)
        child.leases += 1
        return child

    def _append(self, request: Request, top: Node, tokens: bytes) -> Node:
        """Put pages that the tree does not know below ``top``, or in it if it may grow."""
        tree, first = request.tree, request.committed
        num_known = self._num_known(request, top, tokens)
        cut = num_known * tree.page_nbytes or len(tokens)
        tokens, request.uncommitted = tokens[:cut], tokens[cut:]
        slots = request.slots[first : first + len(tokens) // tree.page_nbytes]
        is_growable = (
            not (num_known or top.is_root or top.children)
            and top.leases == top.users == top.uses == 1  # since it was made
            and top.num_pages < MAX_GROWN_PAGES
        )
        if is_growable:
            assert not top.device.incoming
            tree.grow(top, tokens)
            node = top
        else:
            node = tree.add(top, tokens, self._books.now)
            node.leases = 1
        if num_known:  # by a request that used all that is above, too
            node.users = 1
            for part in top.path():
                part.users = max(part.users, 2)
                self._writes.mark(part)
        self._attach_keys(request, node)
        self._books.set_pages(node, "device", node.device.slots + slots)
        return node

    def _num_known(self, request: Request, top: Node, tokens: bytes) -> int:
        """Return how many of the first pages another request used before they were evicted.

        O(pages), and only where it matters for what is stored.
        """
        ghosts = self._books.ghosts
        if self._books.config.min_store_users == 1 or not ghosts.num_pages:
            return 0
        first = request.committed - request.keys_start
        count = len(tokens) // request.tree.page_nbytes
        if first < 0 or len(request.keys) < (first + count) * KEY_NBYTES:
            parent = request.tree.namespace if top.is_root else top.key(top.num_pages - 1)
            request.keys = b"".join(chain(parent, tokens, request.tree.page_nbytes))
            request.keys_start, first = request.committed, 0
        return ghosts.num_used(request.keys, first, first + count, request.user)

    def _attach_keys(self, request: Request, node: Node) -> None:
        """Give a node the keys that were computed for the probe, so that none is computed twice."""
        first = node.start + len(node.keys) // KEY_NBYTES - request.keys_start
        above = node.parent
        assert above is not None
        if first >= 0 and len(above.keys) == above.num_pages * KEY_NBYTES:
            last = node.end - request.keys_start
            node.keys += request.keys[first * KEY_NBYTES : last * KEY_NBYTES]

    def _count(self, request: Request, node: Node) -> None:
        """Count a request as a user of a node, once, however many chunks it computes there."""
        node.last_used = self._books.now
        node.priority = max(node.priority, request.priority)
        if node.last_user != request.user:
            node.last_user = request.user
            node.users += 1
            node.uses += 1
        self._books.refresh(node)
        self._writes.mark(node)
