"""What a tree is made of: runs of pages, and where each run is.

Pages are counted from the start of their node. What must hold between the fields is said, and
asserted, by ``HiRadixTree``.
"""

from abc import abstractmethod
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hicache.keys import KEY_NBYTES, PageKey, PageRef, chain

if TYPE_CHECKING:
    from hicache.tree.radix import HiRadixTree

NO_SLOTS = array("i")
"""Shared by all residences that hold nothing: never changed in place."""

NO_CHILDREN: dict[bytes, "Node"] = {}
"""Shared by all nodes without children: never changed in place."""


class Claim(Protocol):
    """What refers to nodes, such as an operation, and follows them when they split."""

    @abstractmethod
    def on_split(self, upper: "Node", lower: "Node") -> None:
        """``lower`` has given its leading pages to its new parent ``upper``."""

    @abstractmethod
    def on_detach(self, node: "Node") -> None:
        """``node`` has left the tree: what it can no longer lead to is to be given up."""

    @abstractmethod
    def covers(self, node: "Node") -> bool:
        """Whether it refers to ``node``."""


@dataclass(eq=False, slots=True)
class Residence:
    """Which pages of a node are in one tier."""

    slots: "array[int]" = field(default_factory=lambda: NO_SLOTS)
    """Slots of the leading pages that are resident. Replaced, never changed in place."""
    incoming: "array[int]" = field(default_factory=lambda: NO_SLOTS)
    """Slots of the pages behind those, on their way; all of one operation."""
    holds: int = 0
    """Operations that read this copy: while there are any, none of it is freed."""
    children: int = 0
    """Children of the node with pages here, resident or on their way."""
    entry: Any = None
    """The node's place in an eviction order, which alone knows what it means."""

    @property
    def num_pages(self) -> int:
        """Pages here or on their way."""
        return len(self.slots) + len(self.incoming)

    def split(self, num_pages: int) -> "Residence":
        """Take out the leading pages, as the node is cut behind them; return their residence."""
        slots, incoming = self.slots, self.incoming
        resident = min(len(slots), num_pages)
        upper = Residence(
            slots[:num_pages] or NO_SLOTS, incoming[: num_pages - resident] or NO_SLOTS, self.holds
        )
        self.slots = slots[num_pages:] or NO_SLOTS
        self.incoming = incoming[num_pages - resident :] or NO_SLOTS
        upper.children = int(self.num_pages > 0)
        return upper


@dataclass(eq=False, slots=True)
class Node:
    """A run of pages that every sequence below it shares."""

    tokens: bytes
    """Token ids, packed, a whole number of pages."""
    parent: "Node | None"
    tree: "HiRadixTree"
    start: int
    """Pages before this node."""
    num_pages: int
    children: "dict[bytes, Node]" = field(default_factory=lambda: NO_CHILDREN)
    """By the tokens of the child's first page."""
    firsts: list[bytes] | None = None
    """The keys of ``children``, sorted, beyond ``SORT_ABOVE`` of them."""
    keys: bytes = b""
    """Page keys of the leading pages whose keys have been asked for."""
    device: Residence = field(default_factory=Residence)
    host: Residence = field(default_factory=Residence)
    stored: int = 0
    """Leading pages that are believed to be in L3; healed by the first failed read."""
    storing: int = 0
    """Pages behind those that are being stored, all by one operation."""
    leases: int = 0
    """Requests that need this node in L1."""
    uses: int = 0
    """Every acquire."""
    users: int = 0
    """Distinct requests."""
    last_user: int = -1
    last_used: float = 0.0
    created: float = 0.0
    priority: int = 0
    kept_until: float = 0.0
    touched: float = 0.0
    """When its records were last counted as used."""
    entry: Any = None
    """The node's place in the order in which beliefs are forgotten."""
    claims: tuple[Claim, ...] = ()
    """Operations and prefetches that refer to this node."""

    @property
    def end(self) -> int:
        """Pages up to the end of this node."""
        return self.start + self.num_pages

    @property
    def is_root(self) -> bool:
        """Whether this is the empty node at the top of a tree."""
        return self.parent is None

    def __repr__(self) -> str:
        return (
            f"<Node {self.start}+{self.num_pages}p device={len(self.device.slots)}"
            f"+{len(self.device.incoming)} host={len(self.host.slots)}+{len(self.host.incoming)} "
            f"stored={self.stored}+{self.storing} leases={self.leases} "
            f"holds={self.device.holds}/{self.host.holds} children={len(self.children)}>"
        )

    def path(self) -> "list[Node]":
        """Return the nodes from below the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def page(self, index: int) -> bytes:
        """Return the tokens of one page of this node."""
        nbytes = self.tree.page_nbytes
        return self.tokens[index * nbytes : (index + 1) * nbytes]

    def key(self, index: int) -> PageKey:
        """Return the key of one page; computes those of the path that are not known yet."""
        if len(self.keys) <= index * KEY_NBYTES:
            self._complete_keys()
        return PageKey(self.keys[index * KEY_NBYTES : (index + 1) * KEY_NBYTES])

    def leading_keys(self, num_pages: int) -> list[PageKey]:
        """Return the keys of the first pages, where all of them are known or can be computed."""
        if num_pages:
            self.key(num_pages - 1)
        return [
            PageKey(self.keys[start : start + KEY_NBYTES])
            for start in range(0, num_pages * KEY_NBYTES, KEY_NBYTES)
        ]

    def refs(self, first: int, last: int) -> list[PageRef]:
        """Return what identifies the pages ``first`` to ``last - 1`` of this node."""
        parent = self.parent_key() if first == 0 else self.key(first - 1)
        self.key(last - 1)
        keys, tokens, nbytes, refs = self.keys, self.tokens, self.tree.page_nbytes, list[PageRef]()
        for index in range(first, last):
            key = PageKey(keys[index * KEY_NBYTES : (index + 1) * KEY_NBYTES])
            page = tokens[index * nbytes : (index + 1) * nbytes]
            refs.append(PageRef(key, parent, self.start + index, page))
            parent = key
        return refs

    def parent_key(self) -> bytes:
        """Return the key of the page before this node, or the namespace digest."""
        parent = self.parent
        if parent is None or parent.parent is None:
            return self.tree.namespace
        return parent.key(parent.num_pages - 1)

    def _complete_keys(self) -> None:
        missing: list[Node] = []
        node: Node | None = self
        while node is not None and not node.is_root:
            if len(node.keys) == node.num_pages * KEY_NBYTES:
                break
            missing.append(node)
            node = node.parent
        for node in reversed(missing):
            known = len(node.keys) // KEY_NBYTES
            parent = node.keys[-KEY_NBYTES:] or node.parent_key()
            rest = node.tokens[known * self.tree.page_nbytes :]
            node.keys += b"".join(chain(parent, rest, self.tree.page_nbytes))
