"""Requests in L1, once they run: growing, giving back, and what a failed load takes from them."""

from array import array

from hicache.actions import Fact, Grown, Preempt, Refuse, Revoke, Wait
from hicache.events import RequestId
from hicache.planner.committing import Committing
from hicache.planner.operations import TARGET, Operation
from hicache.planner.requests import Request
from hicache.planner.residency import Residency, leading
from hicache.planner.room import Room
from hicache.planner.weighing import Weighing
from hicache.tree import Node


class Leases:
    """The part of the planner that minds what running requests have of L1."""

    def __init__(
        self,
        residency: Residency,
        room: Room,
        committing: Committing,
        weighing: Weighing,
        running: dict[RequestId, Request],
    ) -> None:
        self._books = residency
        self._room = room
        self._committing = committing
        self._weighing = weighing
        self._running = running

    # ------------------------------------------------------------ growing

    def extend(self, request: Request, num_pages: int) -> None:
        """Give a request private slots up to ``num_pages`` pages, or say what to do instead."""
        books = self._books
        missing = max(0, num_pages - len(request.slots))
        slots = self._room.take_device(missing)
        if slots is not None:
            request.slots += slots
            books.actions.append(Grown(request.id, slots))
        elif self._room.coming >= missing:
            books.actions.append(Wait(request.id, "demoting"))
        elif num_pages > books.config.device_pages or self._is_alone():
            reason = f"needs {num_pages} pages, L1 has {books.config.device_pages}"
            books.actions.append(Refuse(request.id, reason))
        else:
            self._preempt(missing)
            books.actions.append(Wait(request.id, "device_full"))

    def _is_alone(self) -> bool:
        """Whether one request has all of L1 that can be had, now or soon."""
        return len(self._running) == 1 and not any(
            op.kind == "back_up" or TARGET[op.kind] == "device"
            for op in self._books.operations.values()
        )

    def _preempt(self, num_pages: int) -> None:
        """Ask for a request's slots, the least and last one's, unless enough are on their way."""
        if len(self._running) == 1:
            return
        asked = [other for other in self._running.values() if other.is_preempted]
        if sum(other.num_private for other in asked) >= num_pages:
            return
        victim = min(
            (other for other in self._running.values() if not other.is_preempted),
            key=lambda other: (other.priority, -other.id),
            default=None,
        )
        if victim is not None:
            victim.is_preempted = True
            num_private = victim.num_private
            self._books.facts.append(Fact("preempted", "device", "", num_private, victim.id))
            self._books.actions.append(Preempt(victim.id))

    # ------------------------------------------------------------ giving back

    def release(self, request: Request) -> None:
        """Take back everything that a running request has. O(its nodes and private slots)."""
        self._committing.commit(request, b"")
        self._free_private(request, 0)
        node = request.lease
        assert node is not None
        self._books.lease(node.path(), -1)
        del self._running[request.id]
        request.lease = None
        while not node.is_root:
            self._books.merge_up(node)
            assert node.parent is not None
            node = node.parent

    def _free_private(self, request: Request, first: int) -> None:
        """Free the private slots from a page on; one being written is freed by its copy."""
        private = array("i", (request.slots[i] for i in sorted(request.duplicates) if i >= first))
        private += request.slots[max(request.committed, first) :]
        if request.copy is not None:
            private.remove(request.copy.target)
            request.copy.orphans.append(request.copy.target)
            request.copy = None
        self._books.device_slots.free(private)
        request.duplicates = {index for index in request.duplicates if index < first}

    # ------------------------------------------------------------ what loads bring

    def copied(self, op: Operation, is_good: bool) -> None:
        """Take note that a page was copied for a partial hit, or was not."""
        assert op.request is not None
        request = self._running.get(op.request)
        if request is not None and request.copy is op:
            request.copy = None
            if not is_good:
                self._revoke(request, request.committed)

    def loaded(self, op: Operation, outcomes: list[bool], seconds: float | None) -> list[Operation]:
        """Make loaded pages resident. A failure takes all that leads on from it out of L1.

        A load that ends before one above it has no say until that one has. Returns the loads that
        count as ended now.
        """
        above = _load_above(op)
        if above is not None:
            above.followers.append((op, outcomes, seconds))
            op.has_ended = True
            return []
        self._arrive(op, outcomes, seconds)
        ended = [op]
        for follower in op.followers:
            ended += self.loaded(*follower)
        return ended

    def _arrive(self, op: Operation, outcomes: list[bool], seconds: float | None) -> None:
        books = self._books
        good = leading(outcomes)
        outcomes = [index < good for index in range(len(outcomes))]
        for node, arrived, expected in books.arrived(op, outcomes):
            if arrived:
                books.facts.append(Fact("loaded", "device", "", arrived, op.request))
            if arrived < expected:
                books.facts.append(Fact("failed", "device", "load", expected - arrived, op.request))
                self._cut(node)
        if good == len(outcomes):
            self._weighing.loaded(good, op.started, books.now, seconds)

    def _cut(self, node: Node) -> None:
        """Take out of L1 what is below the resident pages of a node, and revoke who needs it."""
        valid = node.start + len(node.device.slots)
        if node.leases:
            needing = [r for r in self._running.values() if r.lease and node in r.lease.path()]
            if node.device.slots:
                node.tree.split(node, len(node.device.slots))  # the node is what is not valid
            for request in needing:
                self._revoke(request, valid)
        below = [node]
        for part in below:
            below.extend(part.children.values())
        for part in below:
            for op in _loads(part):
                op.orphans += part.device.incoming
                op.drop(part)
                self._books.set_pages(part, "device", part.device.slots)
                self._books.unclaim(part, op)
            assert part is node or not part.device.num_pages
        for part in reversed(below):
            self._books.settle(part, "device")

    def _revoke(self, request: Request, num_pages: int) -> None:
        """Cut a request back to its first pages: what was behind them never arrived."""
        self._free_private(request, num_pages)
        node = request.lease
        assert node is not None
        while node.end > num_pages:
            self._books.lease([node], -1)
            assert node.parent is not None
            node = node.parent
        assert node.end == num_pages
        request.lease, request.committed = node, num_pages
        request.uncommitted, request.slots = b"", request.slots[:num_pages]
        num_tokens = num_pages * self._books.config.page_size
        self._books.actions.append(Revoke(request.id, num_tokens, request.slots[:]))


def _load_above(op: Operation) -> Operation | None:
    """The load that brings what is right above the pages that another one brings."""
    top = next((span.node for span in op.spans if span.node is not None), None)
    if top is None or top.parent is None or not top.parent.device.incoming:
        return None
    (above,) = _loads(top.parent)
    return above


def _loads(node: Node) -> list[Operation]:
    """The loads that bring pages to a node."""
    return [
        claim for claim in node.claims
        if isinstance(claim, Operation) and claim.brings("load", node)
    ]  # fmt: skip
