"""The page table: a radix tree over token ids, which knows what is where in three tiers."""

from hicache.tree.match import Match, Partial, TierPages
from hicache.tree.node import NO_CHILDREN, NO_SLOTS, Claim, Node, Residence
from hicache.tree.radix import SORT_ABOVE, HiRadixTree

__all__ = [
    "NO_CHILDREN",
    "NO_SLOTS",
    "SORT_ABOVE",
    "Claim",
    "HiRadixTree",
    "Match",
    "Node",
    "Partial",
    "Residence",
    "TierPages",
]
