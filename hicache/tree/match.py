"""What a lookup finds."""

from dataclasses import dataclass

from hicache.tree.node import Node


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
        """Return how far the match reaches in each tier. O(nodes below the part in L1).

        What is above a page in L1 counts as in L1, though some may still be on its way there.
        """
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
            in_host = min(node.start + len(node.host.slots), self.num_pages)
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
