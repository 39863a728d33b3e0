"""A third party's policies."""

from hicache.tree import Node

NO_POLICY = 5


def youngest(node: Node) -> float:
    """Rank what was used last lowest."""
    return -node.last_used
