"""The radix tree over token ids: which tier holds the pages of which prefix.

Pure bookkeeping. No tensors, no I/O, no clock: callers pass ``now``. It knows where pages are
and who claims them; what to do about that is the planner's business.

Invariants, asserted by ``HiRadixTree.check``:

1. A node's tokens are a positive multiple of ``page_size``; a node is filed in its parent under
   its first page, so siblings differ there.
2. In L1 and L2 the *leading* pages of a node are resident, then come those on their way, so that
   trimming a tail splits nothing. The same holds for the belief that pages are stored.
3. Every page of a node is resident or on its way somewhere, or is believed stored.
4. If a node has pages in L1, resident or on their way, its parent is whole in L1, likewise.
5. ``leases`` of a node is at least the sum of its children's; a leased node is whole in L1.
6. Each residence counts the children that have pages in its tier: 0 makes the node a leaf there.
7. A claim that is filed with a node covers that node.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from hicache.keys import KEY_NBYTES, TOKEN_NBYTES, NamespaceDigest, PageKey, PageRef, chain

NO_SLOTS = array("i")
"""Shared by all residences that hold nothing: never changed in place."""

NO_CHILDREN: dict[bytes, "Node"] = {}
"""Shared by all nodes without children: never changed in place."""

SORT_ABOVE = 8
"""Nodes with more children keep their first pages sorted, for partial matches by bisection."""


class Claim(Protocol):
    """Something that refers to nodes (an operation, a prefetch) and follows them when they split."""

    def on_split(self, upper: "Node", lower: "Node") -> None:
        """``lower`` has given its leading pages to its new parent ``upper``."""

    def on_detach(self, node: "Node") -> None:
        """``node`` has left the tree: what it can no longer lead to is to be given up."""

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

    def __lt__(self, other: "Node") -> bool:
        """Order equal ranks in an eviction order the same way in every run."""
        return (self.tokens, self.start) < (other.tokens, other.start)

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
        """Return the key of one page; computes those up to it that are not known yet."""
        if len(self.keys) <= index * KEY_NBYTES:
            self._complete_keys()
        return PageKey(self.keys[index * KEY_NBYTES : (index + 1) * KEY_NBYTES])

    def refs(self, first: int, last: int) -> list[PageRef]:
        """Return what identifies the pages ``first`` to ``last - 1`` of this node."""
        parent = self.parent_key() if first == 0 else self.key(first - 1)
        refs = []
        for index in range(first, last):
            key = self.key(index)
            refs.append(PageRef(key, parent, self.start + index, self.page(index)))
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


@dataclass(frozen=True, slots=True)
class Partial:
    """The page after a match agrees with the request for its first tokens only."""

    node: Node
    index: int
    """Of the page within the node."""
    num_tokens: int
    """At least 1, less than a page."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix that the tree knows. Valid until the tree changes."""

    node: Node
    """The deepest node that it reaches; the root where nothing matches."""
    num_pages: int
    """Pages that match, in all; may end inside ``node``."""

    @property
    def inside(self) -> int:
        """Pages of ``node`` that match."""
        return self.num_pages - self.node.start

    def tiers(self) -> "TierPages":
        """Return how far the match reaches in each tier. O(nodes below the part in L1)."""
        below: list[Node] = []
        node = self.node
        while node.parent is not None and not node.device.slots:
            below.append(node)
            node = node.parent
        device = min(node.start + len(node.device.slots), self.num_pages)
        if len(node.device.slots) < node.num_pages:
            below.append(node)
        host = stored = device
        for node in reversed(below):
            in_host = min(max(node.start + len(node.host.slots), device), self.num_pages)
            if host >= node.start:
                host = max(host, in_host)
            reach = max(in_host, min(node.start + node.stored, self.num_pages))
            if stored >= node.start:
                stored = max(stored, reach)
        return TierPages(device, host, stored)


@dataclass(frozen=True, slots=True)
class TierPages:
    """Leading pages of a match that are at hand from a tier or a faster one; cumulative."""

    device: int
    host: int
    storage: int


class HiRadixTree:
    """The page table of one namespace."""

    def __init__(
        self,
        namespace: NamespaceDigest,
        page_size: int,
        on_split: Callable[[Node, Node], None] | None = None,
    ) -> None:
        """``on_split`` is told of every split: the upper part, then the lower."""
        self.namespace = namespace
        self._on_split = on_split
        self.page_size = page_size
        self.page_nbytes = page_size * TOKEN_NBYTES
        self.root = Node(b"", None, self, 0, 0)

    # ------------------------------------------------------------ looking

    def match(self, tokens: bytes) -> Match:
        """Return the longest prefix of ``tokens`` that the tree knows, in whole pages.

        Changes nothing: no split, no touch. O(nodes on the path) plus one memcmp of the tokens,
        however large the tree.
        """
        node, offset, page_nbytes = self.root, 0, self.page_nbytes
        while (child := node.children.get(tokens[offset : offset + page_nbytes])) is not None:
            if not tokens.startswith(child.tokens, offset):
                return Match(child, child.start + self._agreeing_pages(child, tokens, offset))
            node = child
            offset += len(child.tokens)
        return Match(node, node.start + node.num_pages)

    def partial(self, match: Match, tokens: bytes) -> Partial | None:
        """Return how far the page after the match agrees with ``tokens``, if at all.

        O(children) up to ``SORT_ABOVE`` of them, O(log children) beyond.
        """
        node, offset = match.node, match.num_pages * self.page_nbytes
        wanted = tokens[offset : offset + self.page_nbytes]
        if not wanted:
            return None
        if match.inside < node.num_pages:
            num_tokens = _agreeing_tokens(wanted, node.page(match.inside))
            return Partial(node, match.inside, num_tokens) if num_tokens else None
        if node.firsts is None:
            candidates = list(node.children)
        else:
            place = bisect_left(node.firsts, wanted)
            candidates = node.firsts[max(place - 1, 0) : place + 1]
        best, num_tokens = b"", 0
        for first in candidates:
            agreeing = _agreeing_tokens(wanted, first)
            if agreeing > num_tokens or (agreeing == num_tokens > 0 and first < best):
                best, num_tokens = first, agreeing
        return Partial(node.children[best], 0, num_tokens) if num_tokens else None

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ------------------------------------------------------------ changing

    def locate(self, tokens: bytes, top: Node | None = None) -> Node:
        """Return the node at whose end the longest known prefix of ``tokens`` ends.

        Splits where it would end inside a node. ``tokens`` begin behind ``top`` (the root if
        None), and are a whole number of pages.
        """
        node, offset, page_nbytes = top or self.root, 0, self.page_nbytes
        while (child := node.children.get(tokens[offset : offset + page_nbytes])) is not None:
            if not tokens.startswith(child.tokens, offset):
                return self.split(child, self._agreeing_pages(child, tokens, offset))
            node = child
            offset += len(child.tokens)
        return node

    def add(self, parent: Node, tokens: bytes, now: float) -> Node:
        """Return a new child; no page of it is anywhere yet, which the caller mends at once."""
        num_pages = len(tokens) // self.page_nbytes
        assert num_pages > 0
        assert len(tokens) % self.page_nbytes == 0
        node = Node(tokens, parent, self, parent.end, num_pages, last_used=now, created=now)
        self._adopt(parent, node)
        return node

    def grow(self, node: Node, tokens: bytes) -> None:
        """Append pages to a leaf; they are nowhere yet, which the caller mends at once."""
        assert not node.children
        assert len(tokens) % self.page_nbytes == 0
        node.tokens += tokens
        node.num_pages = len(node.tokens) // self.page_nbytes

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node after ``num_pages`` pages and return the new upper part.

        The node itself becomes the lower part, so that who refers to the end of the node still
        does. Slots, beliefs, leases, holds and claims pass to both halves; no page moves.
        """
        assert 0 < num_pages < node.num_pages
        parent = node.parent
        assert parent is not None
        cut = num_pages * self.page_nbytes
        upper = Node(
            node.tokens[:cut], parent, self, node.start, num_pages,
            keys=node.keys[: num_pages * KEY_NBYTES],
            stored=min(node.stored, num_pages),
            storing=max(0, min(node.stored + node.storing, num_pages) - node.stored),
            leases=node.leases, uses=node.uses, users=node.users, last_user=node.last_user,
            last_used=node.last_used, created=node.created, priority=node.priority,
            kept_until=node.kept_until, touched=node.touched, claims=node.claims,
        )  # fmt: skip
        first = node.tokens[: self.page_nbytes]
        node.tokens, node.parent = node.tokens[cut:], upper
        node.keys = node.keys[num_pages * KEY_NBYTES :]
        node.start, node.num_pages = node.start + num_pages, node.num_pages - num_pages
        node.stored -= upper.stored
        node.storing -= upper.storing
        upper.device = _split_residence(node.device, num_pages)
        upper.host = _split_residence(node.host, num_pages)
        parent.children[first] = upper  # in the place of node, under the same first page
        upper.children = {node.tokens[: self.page_nbytes]: node}
        for claim in upper.claims:
            claim.on_split(upper, node)
        upper.claims = tuple(claim for claim in upper.claims if claim.covers(upper))
        node.claims = tuple(claim for claim in node.claims if claim.covers(node))
        if self._on_split is not None:
            self._on_split(upper, node)
        return upper

    def is_mergeable(self, lower: Node) -> bool:
        """Whether a node and its parent differ in nothing that matters."""
        upper = lower.parent
        return (
            upper is not None
            and upper.parent is not None
            and len(upper.children) == 1
            and upper.leases == lower.leases
            and not upper.claims
            and not lower.claims
            and upper.kept_until == lower.kept_until
            and (len(upper.device.slots) == upper.num_pages or not lower.device.slots)
            and (len(upper.host.slots) == upper.num_pages or not lower.host.slots)
            and (upper.stored == upper.num_pages or not lower.stored)
        )

    def merge(self, run: list[Node]) -> Node:
        """Join a run of nodes, top first, each mergeable with the next; the last one stays."""
        top, node = run[0], run[-1]
        parent = top.parent
        assert parent is not None
        assert all(self.is_mergeable(lower) for lower in run[1:])
        node.tokens = b"".join(part.tokens for part in run)
        node.keys = b"".join(part.keys for part in run)
        node.device.slots = _join([part.device.slots for part in run])
        node.host.slots = _join([part.host.slots for part in run])
        node.stored = sum(part.stored for part in run)
        node.start, node.num_pages = top.start, sum(part.num_pages for part in run)
        node.uses = max(part.uses for part in run)
        node.users = max(part.users for part in run)
        node.last_used = max(part.last_used for part in run)
        node.created = min(part.created for part in run)
        node.priority = max(part.priority for part in run)
        node.touched = min(part.touched for part in run)
        node.parent = parent
        parent.children[node.tokens[: self.page_nbytes]] = node
        for part in run[:-1]:
            part.parent, part.children = None, NO_CHILDREN
        return node

    def shrink(self, node: Node, num_pages: int) -> None:
        """Forget the pages of a childless node beyond ``num_pages``; with 0, the node."""
        assert not node.children
        assert num_pages >= max(node.device.num_pages, node.host.num_pages)
        assert num_pages >= node.stored + node.storing
        if num_pages == 0:
            self.remove(node)
            return
        node.tokens = node.tokens[: num_pages * self.page_nbytes]
        node.keys = node.keys[: num_pages * KEY_NBYTES]
        node.num_pages = num_pages

    def remove(self, node: Node) -> None:
        """Take a node, and so all below it, out of the tree. Counts of the parent follow."""
        parent = node.parent
        assert parent is not None
        first = node.tokens[: self.page_nbytes]
        assert parent.children[first] is node
        parent.device.children -= node.device.num_pages > 0
        parent.host.children -= node.host.num_pages > 0
        del parent.children[first]
        if parent.firsts is not None:
            del parent.firsts[bisect_left(parent.firsts, first)]
            if len(parent.children) <= SORT_ABOVE:
                parent.firsts = None
        if not parent.children:
            parent.children = NO_CHILDREN
        node.parent = None

    def _adopt(self, parent: Node, node: Node) -> None:
        if parent.children is NO_CHILDREN:
            parent.children = {}
        first = node.tokens[: self.page_nbytes]
        assert first not in parent.children
        parent.children[first] = node
        if parent.firsts is not None:
            insort(parent.firsts, first)
        elif len(parent.children) > SORT_ABOVE:
            parent.firsts = sorted(parent.children)

    def _agreeing_pages(self, node: Node, tokens: bytes, offset: int) -> int:
        """Whole pages of a node that agree with ``tokens`` from ``offset`` on, by bisection.

        The first agrees, and not all do.
        """
        page_nbytes = self.page_nbytes
        agreeing, differing = 1, node.num_pages
        while differing - agreeing > 1:
            middle = (agreeing + differing) // 2
            low, high = agreeing * page_nbytes, middle * page_nbytes
            if tokens[offset + low : offset + high] == node.tokens[low:high]:
                agreeing = middle
            else:
                differing = middle
        low, high = agreeing * page_nbytes, differing * page_nbytes
        if differing > agreeing and tokens[offset + low : offset + high] == node.tokens[low:high]:
            agreeing = differing
        return agreeing

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Assert the invariants of this module's docstring. O(nodes)."""
        root = self.root
        assert root.parent is None
        assert root.start == root.num_pages == 0
        assert root.device.num_pages == root.host.num_pages == root.stored == 0
        self._check_children(root)
        for node in self.nodes():
            self._check_node(node)
            self._check_children(node)

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert node.tree is self
        assert node.num_pages > 0
        assert len(node.tokens) == node.num_pages * self.page_nbytes
        assert node.start == parent.end
        assert len(node.keys) % KEY_NBYTES == 0
        assert len(node.keys) <= node.num_pages * KEY_NBYTES
        reach = max(node.device.num_pages, node.host.num_pages, node.stored + node.storing)
        assert reach == node.num_pages, f"pages of {node} are nowhere, or too many"
        if node.device.num_pages and not parent.is_root:
            assert parent.device.num_pages == parent.num_pages, f"L1 has a hole above {node}"
        assert node.leases == 0 or node.device.num_pages == node.num_pages
        assert min(node.leases, node.device.holds, node.host.holds, node.stored) >= 0
        assert node.storing == 0 or node.host.holds > 0, f"stores from a free copy: {node}"
        for claim in node.claims:
            assert claim.covers(node)

    def _check_children(self, node: Node) -> None:
        children = node.children
        for first, child in children.items():
            assert child.parent is node
            assert child.tokens[: self.page_nbytes] == first
        if not node.is_root:
            assert node.leases >= sum(child.leases for child in children.values())
        assert node.device.children == sum(c.device.num_pages > 0 for c in children.values())
        assert node.host.children == sum(c.host.num_pages > 0 for c in children.values())
        assert node.firsts is None or node.firsts == sorted(children)
        assert (node.firsts is None) == (len(children) <= SORT_ABOVE)


def _agreeing_tokens(one: bytes, other: bytes) -> int:
    """Leading tokens in which two packed runs agree."""
    nbytes = min(len(one), len(other))
    difference = int.from_bytes(one[:nbytes], "little") ^ int.from_bytes(other[:nbytes], "little")
    if difference == 0:
        return nbytes // TOKEN_NBYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_NBYTES)


def _split_residence(lower: Residence, num_pages: int) -> Residence:
    """Take the leading pages out of a residence as its node is cut; return theirs."""
    slots, incoming = lower.slots, lower.incoming
    resident = min(len(slots), num_pages)
    upper = Residence(
        slots[:num_pages] or NO_SLOTS, incoming[: num_pages - resident] or NO_SLOTS, lower.holds
    )
    lower.slots = slots[num_pages:] or NO_SLOTS
    lower.incoming = incoming[num_pages - resident :] or NO_SLOTS
    upper.children = int(lower.num_pages > 0)
    return upper


def _join(parts: "list[array[int]]") -> "array[int]":
    joined = array("i")
    for part in parts:
        joined += part
    return joined or NO_SLOTS
