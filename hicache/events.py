"""Events: what the planner is told.

Each is a frozen value. The body (``HiCache`` or a replay) passes them to ``Planner.handle``
with the time, and carries out the actions that come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

from hicache.keys import NamespaceDigest, PageKey

RequestId = NewType("RequestId", int)
OpId = NewType("OpId", int)


class Event:
    """Anything that the planner is told."""

    __slots__ = ()


# ---------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """A request exists; what it can reuse may be fetched ahead of its turn."""

    request: RequestId
    namespace: NamespaceDigest
    tokens: bytes
    """Its whole sequence so far, packed."""
    max_hit_tokens: int
    """How much of it may be reused; an engine that needs one logit says one token less."""
    priority: int = 0
    continues: RequestId | None = None
    """The id under which it came first, where it was preempted and comes again: it is still one
    user of its pages."""


@dataclass(frozen=True, slots=True)
class Wanted(Event):
    """The scheduler would run the request now: answer with Grant, Wait or Refuse."""

    request: RequestId
    num_tokens_ahead: int
    """Slots are granted for this many tokens beyond the hit, at most to the end of its tokens."""


@dataclass(frozen=True, slots=True)
class Extended(Event):
    """A granted request needs slots for ``num_pages`` pages in all: Grown, Wait or Preempt."""

    request: RequestId
    num_pages: int


@dataclass(frozen=True, slots=True)
class Computed(Event):
    """The next pages of a granted request are full and their KV is in its slots."""

    request: RequestId
    tokens: bytes
    """Of the pages after those committed so far: a whole number of pages, packed."""


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The request is done, aborted or preempted; it gives everything back.

    Harmless for a request that was never granted.
    """

    request: RequestId


# ---------------------------------------------------------------- operations


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """A load, back-up, page copy, fetch or store is over, with one outcome a page.

    ``is_returned`` is False where a deadline ended the waiting but the backend's call still
    owns the pages: they stay lent until ``Returned``.
    """

    op: OpId
    outcomes: Sequence[bool]
    is_returned: bool = True
    seconds: float | None = field(default=None, compare=False)
    """How long it took, where that is known: it may be heard of a whole step later. None: until
    now."""


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """The backend's call behind an overdue operation has really returned."""

    op: OpId


@dataclass(frozen=True, slots=True)
class Probed(Event):
    """A probe is over: which keys storage has. All False where it failed."""

    op: OpId
    found: Sequence[bool]


# ---------------------------------------------------------------- storage at large


@dataclass(frozen=True, slots=True)
class ChainFound(Event):
    """A scan of the store found this chain of pages, from the first page on."""

    namespace: NamespaceDigest
    tokens: bytes
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class StorageUp(Event):
    """Storage can be used (again)."""


@dataclass(frozen=True, slots=True)
class StorageDown(Event):
    """Storage cannot be used for now: no probes, fetches or stores until it is up."""


# ---------------------------------------------------------------- operators and time


@dataclass(frozen=True, slots=True)
class Flushed(Event):
    """Empty L1 and L2 of all that no request or operation needs. L3 keeps its records."""


@dataclass(frozen=True, slots=True)
class Synced(Event):
    """Back up and store everything that is not acknowledged yet, whatever the write policy."""


@dataclass(frozen=True, slots=True)
class Forgotten(Event):
    """Drop a prefix and all below it, from every tier; an empty one drops the namespace."""

    namespace: NamespaceDigest
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class Kept(Event):
    """Keep a prefix in L1 or L2 until a time, as far as space allows."""

    namespace: NamespaceDigest
    tokens: bytes
    until: float


@dataclass(frozen=True, slots=True)
class Measured(Event):
    """The engine computed this many prompt tokens in this many seconds."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ticked(Event):
    """Time has passed."""
