"""What is asked of storage, and the calls to a backend that it becomes.

An *operation* is what was asked for: it ends with exactly one ``Finished`` or ``Probed``. A *call*
is one call to the backend, for keys of one or more operations of one kind. A *lane* is one
direction of traffic.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hicache.events import OpId
from hicache.keys import NamespaceDigest, PageKey, PageRef

Kind = Literal["probe", "fetch", "store", "delete", "touch", "describe"]

AWAITED: tuple[Kind, ...] = ("probe", "fetch", "store")
"""Kinds that somebody waits for."""
KINDS: tuple[Kind, ...] = (*AWAITED, "delete", "touch", "describe")

MISSED = "missed"
"""The reason of keys that a call asked for and storage did not have: no failure."""


@dataclass(eq=False, slots=True)
class Operation:
    """Something asked for, key by key, and how far it has got."""

    kind: Kind
    keys: Sequence[PageKey]
    op: OpId | None = None
    """``None`` for what nobody waits for: deletes, touches, descriptors."""
    namespace: NamespaceDigest = NamespaceDigest(b"")
    pages: Sequence[PageRef] = ()
    """For fetches and stores, one a key."""
    slots: "array[int]" = field(default_factory=lambda: array("i"))
    """Pages of the pool, for fetches and stores, one a key."""
    record: Sequence[bytes] = ()
    """What a descriptor's record consists of."""
    outcomes: list[bool] = field(default_factory=list)
    start: int = 0
    """Keys from here to ``stop`` are queued: calls took the ones before."""
    stop: int = 0
    num_resolved: int = 0
    num_calls: int = 0
    """Calls with keys of it that have not returned."""
    is_finished: bool = False
    asked: float = 0.0
    """When it was submitted."""

    @property
    def num_queued(self) -> int:
        """Keys that no call has taken yet."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an operation's keys."""

    operation: Operation
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class Call:
    """One call to the backend."""

    kind: Kind
    parts: list[Part]
    started: float
    deadline: float
    is_given_up: bool = False
    refusal: str = "refused"
    """The reason of what it was not able to store, though nothing failed."""

    @property
    def num_keys(self) -> int:
        """Keys in it, of all its parts."""
        return sum(part.stop - part.start for part in self.parts)

    @property
    def keys(self) -> list[PageKey]:
        """Its keys, part after part."""
        return [key for part in self.parts for key in part.operation.keys[part.start : part.stop]]

    @property
    def num_lent(self) -> int:
        """Pages of the pool that it holds until it has returned."""
        return self.num_keys if self.kind in ("fetch", "store") else 0

    @property
    def slots(self) -> list[int]:
        """The pages of the pool that it holds, part after part."""
        return [
            slot for part in self.parts for slot in part.operation.slots[part.start : part.stop]
        ]


@dataclass(slots=True)
class Lane:
    """What waits for one direction of traffic, and what is under way."""

    max_lent: int
    """Pages of the pool that its calls may hold."""
    urgent: deque[Operation] = field(default_factory=deque)
    """Probes: small, and a request cannot ask for its pages before it has the answer."""
    queue: deque[Operation] = field(default_factory=deque)
    calls: set[Call] = field(default_factory=set)
    """All that have not returned, given up or not."""

    @property
    def running(self) -> list[Call]:
        """Calls that somebody waits for."""
        return [call for call in self.calls if not call.is_given_up]

    @property
    def num_lent(self) -> int:
        """Pages of the pool in its calls."""
        return sum(call.num_lent for call in self.calls)

    @property
    def num_overdue(self) -> int:
        """Pages in calls that were given up."""
        return sum(call.num_lent for call in self.calls if call.is_given_up)
