"""What refers to nodes while it lasts: operations in flight, and prefetches.

Both follow their nodes when these split, and hold the copies that they read.
"""

from array import array
from dataclasses import dataclass, field
from typing import Literal

from hicache.actions import Tier
from hicache.events import OpId, RequestId
from hicache.tree import Node, Residence

Kind = Literal["load", "back_up", "copy_page", "probe", "fetch", "store"]

TARGET: dict[Kind, Tier] = {
    "load": "device",
    "copy_page": "device",
    "back_up": "host",
    "fetch": "host",
    "store": "storage",
    "probe": "storage",
}
"""The tier that an operation brings pages into."""


def residence(node: Node, tier: Tier) -> Residence:
    """Return a node's residence in L1 or L2."""
    return node.device if tier == "device" else node.host


@dataclass(eq=False, slots=True)
class Span:
    """Pages of one node that an operation brings, behind those that are there."""

    node: Node | None
    """None where the node has given the pages up; their outcomes come all the same."""
    num_pages: int


@dataclass(eq=False, slots=True)
class Operation:
    """Something that the body was asked to do and has not finished."""

    id: OpId
    kind: Kind
    started: float
    num_pages: int
    """Outcomes that it will have."""
    request: RequestId | None = None
    spans: list[Span] = field(default_factory=list)
    """The pages it brings, in the order of its outcomes."""
    held: dict[Node, None] = field(default_factory=dict)
    """Nodes whose copy in ``held_tier`` it reads."""
    held_tier: Tier = "host"
    orphans: "array[int]" = field(default_factory=lambda: array("i"))
    """Slots of its target tier that it may still write, but no node or request has any more."""
    target: int = -1
    """Of a page copy: the private slot that it writes."""
    followers: "list[tuple[Operation, list[bool], float | None]]" = field(default_factory=list)
    """Loads below this one that have ended before it, with their outcomes and seconds."""
    has_ended: bool = False
    """Whether the body has reported the end of a load that still follows another."""
    prefetches: "dict[Prefetch, None]" = field(default_factory=dict)
    """Those that wait for this fetch."""
    writes: dict[Node, None] = field(default_factory=dict)
    """Nodes that are written down when this has ended."""
    is_forced: bool = False
    """A back-up that is to be stored whatever the policy."""
    is_retry: bool = False
    """A back-up whose consequences must not evict anything from L2."""
    is_cancelled: bool = False
    is_overdue: bool = False
    """Its deadline has passed; the backend's call still owns the orphans."""

    def on_split(self, upper: Node, lower: Node) -> None:
        """Divide a span as its node was divided; hold both halves."""
        for index, span in enumerate(self.spans):
            if span.node is lower:
                above = self._arriving(upper)
                span.num_pages -= above
                parts = [Span(upper, above)] if above else []
                self.spans[index : index + (span.num_pages == 0)] = parts
                break
        if lower in self.held:
            self.held[upper] = None

    def on_detach(self, node: Node) -> None:
        """Go on, but let go of a node without pages: what it read of that was split off."""
        if node in self.held and not residence(node, self.held_tier).slots:
            del self.held[node]
            residence(node, self.held_tier).holds -= 1

    def drop(self, node: Node) -> None:
        """Bring nothing to this node any more."""
        for span in self.spans:
            if span.node is node:
                span.node = None

    def brings(self, kind: Kind, node: Node) -> bool:
        """Whether it is of this kind and brings pages to the node."""
        return self.kind == kind and any(span.node is node for span in self.spans)

    def covers(self, node: Node) -> bool:
        """Whether it brings pages to the node, or reads its copy."""
        return node in self.held or any(span.node is node for span in self.spans)

    def _arriving(self, node: Node) -> int:
        if self.kind == "store":
            return node.storing
        return len(residence(node, TARGET[self.kind]).incoming)


@dataclass(eq=False, slots=True)
class Prefetch:
    """A request's pages on their way from storage, before it is scheduled."""

    request: RequestId
    held: list[tuple[Node, Tier]] = field(default_factory=list)
    """One copy of every node on its path."""
    probe: Operation | None = None
    fetches: dict[Operation, None] = field(default_factory=dict)
    """Operations that it waits for, also those that others started."""
    is_blocked: bool = False
    """There is more to fetch, for which there was no room yet."""
    was_weighed: bool = False
    """Whether fetching was compared with computing."""
    num_pages: int = 0
    """Pages that it may save."""
    is_wanted: bool = False
    """Whether its request's turn has come."""
    waiting_since: float | None = None
    deadline: float | None = None
    awaited_pages: int = 0
    """``num_pages`` when the deadline was worked out."""

    @property
    def is_pending(self) -> bool:
        """Whether waiting can still bring something."""
        return self.probe is not None or bool(self.fetches) or self.is_blocked

    def on_split(self, upper: Node, lower: Node) -> None:
        """Hold both halves."""
        for node, tier in list(self.held):
            if node is lower:
                self.held.append((upper, tier))

    def on_detach(self, node: Node) -> None:
        """Let go of a node that leads nowhere."""
        for held in [held for held in self.held if held[0] is node]:
            self.held.remove(held)
            residence(node, held[1]).holds -= 1
        node.claims = tuple(claim for claim in node.claims if claim is not self)

    def covers(self, node: Node) -> bool:
        """Whether it holds a copy of the node."""
        return any(held is node for held, _ in self.held)
