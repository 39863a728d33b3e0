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
7. A claim that is filed with a node covers that node; what is on its way, being stored or held
   has one filed.
8. Keys are known from the first page on: where a node has any, its parent has all of its own.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from hicache.keys import KEY_NBYTES, TOKEN_NBYTES, NamespaceDigest
from hicache.tree.match import Match, Partial
from hicache.tree.node import NO_CHILDREN, NO_SLOTS, Node

SORT_ABOVE = 8
"""Nodes with more children keep their first pages sorted, for partial matches by bisection."""


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
        if not wanted or self.page_size == 1:  # a page of one token agrees whole or not at all
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
        upper.device = node.device.split(num_pages)
        upper.host = node.host.split(num_pages)
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
        """Join a run of nodes, top first, each mergeable with the next; the last one stays.

        The others leave the tree; an eviction order that has them is the caller's to mend.
        """
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
        """Return how many pages of a node agree with ``tokens`` from ``offset`` on, by bisection.

        The first page agrees, and not all do.
        """
        page_nbytes = self.page_nbytes
        agreeing, differing = 1, node.num_pages
        while differing - agreeing > 1:
            middle = (agreeing + differing) // 2
            low, high = agreeing * page_nbytes, middle * page_nbytes
            if tokens.startswith(node.tokens[low:high], offset + low):
                agreeing = middle
            else:
                differing = middle
        return agreeing

    # ------------------------------------------------------------ leasing

    def lease(self, node: Node) -> list[Node]:
        """Add a request's lease to a node and all above it. O(nodes on the path).

        Returns the nodes that had none before, deepest first: they can no longer be evicted.
        """
        newly_leased = []
        while node.parent is not None:
            if not node.leases:
                newly_leased.append(node)
            node.leases += 1
            node = node.parent
        return newly_leased

    def unlease(self, node: Node) -> list[Node]:
        """Take a request's lease from a node and all above it. O(nodes on the path).

        Returns the nodes that have none any more, deepest first.
        """
        unleased = []
        while node.parent is not None:
            node.leases -= 1
            assert node.leases >= 0
            if not node.leases:
                unleased.append(node)
            node = node.parent
        return unleased

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
        assert not node.keys or len(parent.keys) == parent.num_pages * KEY_NBYTES
        reach = max(node.device.num_pages, node.host.num_pages, node.stored + node.storing)
        assert reach == node.num_pages, f"pages of {node} are nowhere, or too many"
        if node.device.num_pages and not parent.is_root:
            assert parent.device.num_pages == parent.num_pages, f"L1 has a hole above {node}"
        assert node.leases == 0 or node.device.num_pages == node.num_pages
        assert min(node.leases, node.device.holds, node.host.holds, node.stored) >= 0
        assert node.storing == 0 or node.host.holds > 0, f"stores from a free copy: {node}"
        is_busy = node.device.incoming or node.host.incoming or node.storing
        is_held = node.device.holds or node.host.holds
        assert node.claims or not (is_busy or is_held), f"nobody claims {node}"
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


def _join(parts: "list[array[int]]") -> "array[int]":
    joined = array("i")
    for part in parts:
        joined += part
    return joined or NO_SLOTS
