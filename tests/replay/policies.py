"""A third party's eviction policy."""

from hicache.tree import Node


def youngest(node: Node) -> float:
    """Rank what was used last lowest."""
    return -node.last_used
