"""A request's claim on pages in L1, as the engine holds it."""

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hicache.actions import HitTokens
from hicache.events import OpId, RequestId
from hicache.keys import NamespaceDigest


@dataclass(eq=False, slots=True)
class Lease:
    """A granted request's claim on its pages in L1. Given back by ``HiCache.release``."""

    request: RequestId
    namespace: NamespaceDigest
    slots: "array[int]"
    """The L1 slot of each page, in order: the reused ones, then private ones. Grows in place."""
    hit: HitTokens
    """Tokens that need not be computed: compute from ``hit.total`` on."""
    num_committed_pages: int
    num_valid_tokens: int
    """Leading tokens whose KV is in the slots, or was on its way there; less after a revoke."""
    loads: set[OpId]
    """What is still on its way."""
    wait_for_load: Callable[[OpId, int], int]
    confirm: Callable[["Lease"], None]
    """Waits for the outcome of ``loads``."""
    is_revoked: bool = False

    def wait(self, layer: int) -> int:
        """Return when this layer of what is being loaded may be read: the first that may not yet.

        On a GPU the stream waits, not the caller. Whether it came well, ``is_intact`` tells.
        """
        return min((self.wait_for_load(op, layer) for op in self.loads), default=sys.maxsize)

    @property
    def is_intact(self) -> bool:
        """Whether all that was loaded arrived. To be asked after the forward that read it.

        If not, what was computed from it is worth nothing, and the next ``poll`` lists it.
        """
        if self.loads:
            self.confirm(self)
        return not self.is_revoked


@dataclass(frozen=True, slots=True)
class Polled:
    """What became of leases since the last poll."""

    revoked: Sequence[Lease] = field(default_factory=list)
    """Only their first ``num_valid_tokens`` are there, and only slots for those."""
    preempted: Sequence[Lease] = field(default_factory=list)
    """To be released, to make room for others."""
