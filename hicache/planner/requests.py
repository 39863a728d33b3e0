"""What the planner knows of a request."""

from array import array
from dataclasses import dataclass, field

from hicache.events import RequestId
from hicache.planner.operations import Operation, Prefetch
from hicache.tree import HiRadixTree, Node


@dataclass(eq=False, slots=True)
class Request:
    """A request from its arrival to its release.

    Its slots, in order of its pages, are of three kinds::

        0 ......... committed ......... len(slots)
        in the tree | private            the pages in ``duplicates`` are private, too:
                                         the tree has another copy of them
    """

    id: RequestId
    tree: HiRadixTree
    tokens: bytes
    prefix: bytes
    """The whole pages of ``tokens`` that may be reused."""
    max_hit_tokens: int
    priority: int
    user: RequestId
    """The id under which it came first: it is one user of its pages, however often preempted."""
    local_pages: int = 0
    """Leading pages that were in L1 or L2 when it arrived; a hit beyond them came from L3."""
    fetched_partial: int | None = None
    """The page that was fetched for its first tokens only, if there was one."""
    keys: bytes = b""
    """Keys computed for pages that the tree did not know, from page ``keys_start`` on."""
    keys_start: int = 0
    prefetch: Prefetch | None = None
    unused: str = ""
    """Why pages that a lower tier has are computed all the same."""
    lease: Node | None = None
    """The deepest node that it leases, whole; None before it is granted."""
    committed: int = 0
    """Pages up to the end of ``lease``."""
    slots: "array[int]" = field(default_factory=lambda: array("i"))
    duplicates: set[int] = field(default_factory=set)
    """Committed pages whose slot here is private."""
    uncommitted: bytes = b""
    """Computed pages that could not enter the tree yet, behind ``committed``."""
    copy: Operation | None = None
    """What copies a page into one of its private slots."""
    is_preempted: bool = False

    @property
    def is_granted(self) -> bool:
        """Whether it runs."""
        return self.lease is not None

    @property
    def num_private(self) -> int:
        """L1 slots that only this request has."""
        return len(self.slots) - self.committed + len(self.duplicates)
