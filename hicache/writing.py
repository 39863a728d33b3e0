"""Write policies: when pages of L1 get a copy in L2, and then in L3; and which L3 takes.

Whatever the policy, ancestors are stored before or with their descendants, and a page of L1
that has no copy when it must go is demoted.
"""

from hicache.tree import Node


class WritePolicy:
    """``write_through``: at the first commit."""

    name = "write_through"
    keeps_copies_of_l1 = True
    """Whether a host copy of a page in L1 is worth its room before the page is stored."""

    def is_due(self, node: Node) -> bool:
        """Whether the pages of a node in L1 should be written down now."""
        return True

    def is_due_when_demoted(self, node: Node) -> bool:
        """Whether pages that eviction has just brought from L1 to L2 should be stored."""
        return self.is_due(node)


class WriteThroughSelective(WritePolicy):
    """``write_through_selective``: at the second distinct request that uses them."""

    name = "write_through_selective"

    def is_due(self, node: Node) -> bool:
        return node.users > 1


class WriteBack(WritePolicy):
    """``write_back``: when they are evicted."""

    name = "write_back"
    keeps_copies_of_l1 = False

    def is_due(self, node: Node) -> bool:
        return False

    def is_due_when_demoted(self, node: Node) -> bool:
        return True


ADMISSION: dict[str, int] = {"first": 1, "second": 2}
"""By name: how many distinct requests must have used a page before L3 takes it."""

POLICIES: dict[str, WritePolicy] = {
    policy.name: policy for policy in (WritePolicy(), WriteThroughSelective(), WriteBack())
}
"""By name."""
