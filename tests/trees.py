"""Small trees for tests: nodes whose pages are put where a test wants them."""

from array import array
from collections.abc import Iterable

from hicache.keys import NamespaceDigest, pack
from hicache.tree import NO_SLOTS, Claim, HiRadixTree, Node

NAMESPACE = NamespaceDigest(b"n" * 32)


def packed(*token_ids: int) -> bytes:
    """Return token ids as they travel."""
    return pack(token_ids)


def slots(numbers: Iterable[int]) -> "array[int]":
    """Return slots, the shared empty ones where there are none."""
    return array("i", numbers) or NO_SLOTS


def reside(node: Node, tier: str, numbers: Iterable[int], incoming: Iterable[int] = ()) -> None:
    """Say which pages of a node are in a tier, or on their way, and keep the counts in step."""
    where = node.device if tier == "device" else node.host
    had_pages = where.num_pages > 0
    where.slots, where.incoming = slots(numbers), slots(incoming)
    if node.parent is not None:
        above = node.parent.device if tier == "device" else node.parent.host
        above.children += (where.num_pages > 0) - had_pages


def insert(tree: HiRadixTree, tokens: bytes, now: float = 0.0) -> Node:
    """Return the node at the end of ``tokens``, a new one resident in L1 where it was unknown."""
    node = tree.locate(tokens)
    rest = tokens[node.end * tree.page_nbytes :]
    if not rest:
        return node
    leaf = tree.add(node, rest, now)
    reside(leaf, "device", range(leaf.start, leaf.end))
    return leaf


class Reading(Claim):
    """An operation that reads a node's copy in L1 or L2, and follows it through splits."""

    def __init__(self, node: Node, tier: str = "host") -> None:
        self.nodes = [node]
        self.tier = tier
        (node.host if tier == "host" else node.device).holds += 1
        node.claims = (*node.claims, self)

    def on_split(self, upper: Node, lower: Node) -> None:
        if lower in self.nodes:
            self.nodes.append(upper)

    def on_detach(self, node: Node) -> None:
        self.nodes.remove(node)

    def covers(self, node: Node) -> bool:
        return node in self.nodes

    def end(self) -> None:
        """Let go of all that it reads."""
        for node in self.nodes:
            (node.host if self.tier == "host" else node.device).holds -= 1
            node.claims = tuple(claim for claim in node.claims if claim is not self)
        self.nodes.clear()
