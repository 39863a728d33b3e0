"""Actions: what the planner wants done, and facts: what it has seen happen.

Actions are carried out in order. An action with an ``op`` is an operation: it ends with a
``Finished`` or ``Probed`` event of that id, whatever becomes of the request that caused it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hicache.events import OpId, RequestId
from hicache.keys import NamespaceDigest, PageKey, PageRef

Tier = Literal["device", "host", "storage"]


@dataclass(frozen=True, slots=True)
class HitTokens:
    """Tokens that a request need not compute, by the tier where they were found."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.device + self.host + self.storage


class Action:
    """Anything that the planner wants done."""

    __slots__ = ()


# ---------------------------------------------------------------- answers to requests


@dataclass(frozen=True, slots=True)
class Grant(Action):
    """The request may run: its first ``hit.total`` tokens are in ``slots``, or on the way."""

    request: RequestId
    slots: "array[int]"
    """L1 slots, in order of its pages: the reused ones, then private ones."""
    hit: HitTokens
    loads: tuple[OpId, ...]
    """Operations whose arrival the forward must wait for, layer group by layer group."""


@dataclass(frozen=True, slots=True)
class Grown(Action):
    """More private slots, behind those that the request has."""

    request: RequestId
    slots: "array[int]"


@dataclass(frozen=True, slots=True)
class Wait(Action):
    """Not now; ask again. The reason is for people."""

    request: RequestId
    reason: Literal["storage", "device_full", "demoting"]


@dataclass(frozen=True, slots=True)
class Refuse(Action):
    """Never: the request cannot be run in this L1."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class Preempt(Action):
    """This granted request should be released, to make room for others."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Revoke(Action):
    """A load failed: only the first ``num_tokens`` of what was granted are valid.

    The step that used them is to be discarded; the rest of the slots are the request's own to
    compute into.
    """

    request: RequestId
    num_tokens: int
    slots: "array[int]"
    """All its slots, as they are now."""


# ---------------------------------------------------------------- copies


@dataclass(frozen=True, slots=True)
class Load(Action):
    """Copy pages L2 to L1."""

    op: OpId
    source: "array[int]"
    target: "array[int]"


@dataclass(frozen=True, slots=True)
class BackUp(Action):
    """Copy pages L1 to L2."""

    op: OpId
    source: "array[int]"
    target: "array[int]"


@dataclass(frozen=True, slots=True)
class CopyPage(Action):
    """Copy one page of L1 or L2 to a private L1 slot, for the sake of its first tokens."""

    op: OpId
    source_tier: Tier
    source: int
    target: int
    num_tokens: int


# ---------------------------------------------------------------- storage


@dataclass(frozen=True, slots=True)
class Probe(Action):
    """Ask storage which of these keys it has."""

    op: OpId
    namespace: NamespaceDigest
    keys: Sequence[PageKey]


@dataclass(frozen=True, slots=True)
class Fetch(Action):
    """Read pages L3 to L2, each proved to be the page that it should be."""

    op: OpId
    namespace: NamespaceDigest
    pages: Sequence[PageRef]
    target: "array[int]"


@dataclass(frozen=True, slots=True)
class Store(Action):
    """Write pages L2 to L3."""

    op: OpId
    namespace: NamespaceDigest
    pages: Sequence[PageRef]
    source: "array[int]"


@dataclass(frozen=True, slots=True)
class Touch(Action):
    """Count these records as used, and the description of their namespace."""

    namespace: NamespaceDigest
    keys: Sequence[PageKey]


@dataclass(frozen=True, slots=True)
class Delete(Action):
    """Remove these records."""

    keys: Sequence[PageKey]


@dataclass(frozen=True, slots=True)
class Cancel(Action):
    """Nobody waits for this operation any more; it still finishes with an event."""

    op: OpId


# ---------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that happened to pages: the source of metrics, KV events and explanations."""

    kind: Literal[
        "hit", "computed", "missed", "loaded", "backed_up", "demoted", "evicted", "dropped",
        "probed", "fetched", "stored", "failed", "refused", "preempted", "waited",
    ]  # fmt: skip
    tier: Tier
    reason: str
    num_pages: int
    request: RequestId | None = None
