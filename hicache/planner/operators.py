"""What operators, and a scan of the store, do to the tree."""

from hicache.actions import Delete
from hicache.events import ChainFound, Forgotten, Kept
from hicache.keys import KEY_NBYTES, PageKey
from hicache.planner.keeping import Keeping
from hicache.planner.residency import Residency
from hicache.planner.room import Room


class Operators:
    """The part of the planner that changes the tree for other reasons than a request."""

    def __init__(self, residency: Residency, room: Room, keeping: Keeping) -> None:
        self._books = residency
        self._room = room
        self._keeping = keeping

    def chain_found(self, event: ChainFound) -> None:
        """Believe that storage has a chain of pages. O(nodes on its path and pages)."""
        tree = self._books.tree(event.namespace)
        node = tree.locate(event.tokens)
        known = node.end
        if known * tree.page_nbytes < len(event.tokens):
            node = tree.add(node, event.tokens[known * tree.page_nbytes :], self._books.now)
        for part in node.path():
            if len(part.keys) < part.num_pages * KEY_NBYTES:
                part.keys = b"".join(event.keys[part.start : part.end])
            if not part.storing:
                part.stored = part.num_pages
                self._books.refresh(part)

    def forget(self, event: Forgotten) -> None:
        """Drop a prefix and what is below it, but for what is in use. O(nodes below)."""
        tree = self._books.trees.get(event.namespace)
        if tree is None:
            return
        top = tree.locate(event.tokens)
        if top.end * tree.page_nbytes < len(event.tokens):
            return
        nodes = list(top.children.values()) if top.is_root else [top]
        for node in nodes:
            nodes.extend(node.children.values())
        keys: list[PageKey] = []
        for node in reversed(nodes):
            at_hand = max(node.device.num_pages, node.host.num_pages)
            if node.storing or (node.children and at_hand < node.num_pages):
                continue  # it is being stored, or leads to what is in use
            keys += node.leading_keys(node.stored)
            node.stored = 0
            if node.children:
                self._books.refresh(node)
            else:
                self._room.forget(node)
        if keys:
            self._books.actions.append(Delete(keys))

    def keep(self, event: Kept) -> None:
        """Keep what L1 or L2 have of a prefix."""
        tree = self._books.trees.get(event.namespace)
        if tree is not None:
            num_pages = tree.match(event.tokens).num_pages
            node = tree.locate(event.tokens[: num_pages * tree.page_nbytes])
            self._keeping.keep(node.path(), event.until)
