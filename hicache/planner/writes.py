"""Writing down: L1 to L2 to L3, ancestors first.

A node is *dirty* when the write policy wants it in a lower tier and it is not there yet. Dirty
nodes are pumped: each pump starts what can start now, and leaves the rest to the end of the
operation that is in its way. What fails or finds no room is dropped and counted; eviction from
L1, and the next request that uses it, give it another chance.

Where L3 takes pages only from their second user on, they are kept in L2 until then. A node never
has more users than its parent, so that ancestors are admitted first.
"""

from array import array

from hicache.actions import Fact, Store
from hicache.keys import PageRef
from hicache.planner.operations import Kind, Operation, Span
from hicache.planner.residency import Residency, leading
from hicache.planner.room import Room
from hicache.tree import Node


class Writes:
    """The part of the planner that writes pages down."""

    def __init__(self, residency: Residency, room: Room) -> None:
        self._books = residency
        self._room = room
        self._config = residency.config
        self._dirty: dict[Node, None] = {}
        self._waiting: dict[Node, Operation] = {}
        """Nodes whose turn comes when an operation has ended."""
        self._retry: dict[Node, None] = {}
        """Those whose turn has come. They evict nothing more, or two could evict each other."""
        self._backlog: list[Node] = []
        """Nodes of a sync that wait for room in L2, the next one last."""
        residency.is_pinned = self._is_pinned

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write, and nothing is being written."""
        return not (self._backlog or self._waiting or self._is_writing())

    def mark(self, node: Node) -> None:
        """Write a node down with the next pump, if the policy wants that and it is not done."""
        if not self._config.host_pages:
            return
        is_due = self._config.writing.is_due(node) or self._is_admitted_late(node)
        if is_due and self._wants(node):
            self._dirty[node] = None

    def sync(self) -> None:
        """Write everything down that is not yet, whatever the policy. O(nodes)."""
        if self._config.host_pages:
            nodes = [node for tree in self._books.trees.values() for node in tree.nodes()]
            self._backlog = [node for node in reversed(nodes) if self._wants(node)]

    def pump(self) -> None:
        """Start every write that can start now."""
        while self._dirty or self._retry:
            retry, self._retry = self._retry, {}
            dirty, self._dirty = self._dirty, {}
            done: set[Node] = set()
            for node in reversed(dirty):  # the last of a path writes what is above it, too
                if node.parent is not None and node not in done:
                    done.update(self._write(node, may_evict=True))
            for node in retry:
                if node.parent is not None and node not in done:
                    self._write(node, may_evict=False)
        while self._backlog:
            node = self._backlog[-1]
            if node.parent is not None:
                self._write(node, may_evict=False, is_forced=True)
                if self._wants(node) and node not in self._waiting and self._is_writing():
                    return  # there was no room, but some is to come
            self._backlog.pop()

    # ------------------------------------------------------------ what comes back

    def backed_up(self, op: Operation, outcomes: list[bool]) -> None:
        """Take note of copies in L2; free what was demoted; store."""
        books = self._books
        arrived = books.arrived(op, outcomes)
        books.release_holds(op)
        for node, good, expected in arrived:
            if good:
                books.facts.append(Fact("backed_up", "host", "", good))
            if good < expected:
                books.facts.append(Fact("failed", "host", "back_up", expected - good))
            elif op.is_forced or self._config.writing.is_due_when_demoted(node):
                (self._retry if op.is_retry else self._dirty)[node] = None
            books.settle(node, "host")
            if op in books.demotions and good == expected:
                self._demoted(node)

    def stored(self, op: Operation, outcomes: list[bool], is_returned: bool) -> None:
        """Believe what was stored; the holds end when the backend has let go of the pages."""
        books, done = self._books, 0
        spans, op.spans = op.spans, []
        for span in spans:
            node, mine = span.node, outcomes[done : done + span.num_pages]
            done += span.num_pages
            assert node is not None
            good = leading(mine)
            if node.parent is not None:
                node.storing -= span.num_pages
                node.stored += good
            if good:
                books.facts.append(Fact("stored", "storage", "", good))
            if good < len(mine):
                reason = "store" if is_returned else "late"
                books.facts.append(Fact("failed", "storage", reason, len(mine) - good))
            elif node.stored < len(node.host.slots):
                self._dirty[node] = None
            books.unclaim(node, op)

    def go_on(self, op: Operation, is_good: bool) -> None:
        """Take up what waited for an operation, or drop it where that has failed."""
        for node in op.writes:
            del self._waiting[node]
            if is_good:
                self._retry[node] = None
        op.writes.clear()

    def _demoted(self, node: Node) -> None:
        device = node.device
        if node.leases or device.holds or device.children or device.incoming:
            return
        assert len(device.slots) <= len(node.host.slots)
        self._room.trim_device(node, len(device.slots), "demoted", "room")
        if len(node.children) == 1:
            (child,) = node.children.values()
            self._books.merge_up(child)

    # ------------------------------------------------------------ parts

    def _is_pinned(self, node: Node) -> bool:
        return bool(self._backlog) or any(
            node in nodes for nodes in (self._dirty, self._waiting, self._retry)
        )

    def _is_writing(self) -> bool:
        return any(
            op.kind in ("back_up", "store") and not op.is_overdue
            for op in self._books.operations.values()
        )

    def _wants(self, node: Node) -> bool:
        may_store = self._books.is_storage_up and self._is_admitted(node)
        target = node.stored + node.storing if may_store else len(node.host.slots)
        return target < max(len(node.device.slots), len(node.host.slots))

    def _is_admitted(self, node: Node) -> bool:
        """Whether L3 takes its pages."""
        return node.users >= self._config.min_store_users

    def _is_admitted_late(self, node: Node) -> bool:
        """Whether L3 takes pages only now that came down to L2 before."""
        return (
            self._config.min_store_users > 1
            and self._is_admitted(node)
            and len(node.host.slots) > node.stored + node.storing
        )

    def _write(self, node: Node, *, may_evict: bool, is_forced: bool = False) -> list[Node]:
        """Start what brings a node and its ancestors down; return those that wanted it."""
        if node in self._waiting:
            del self._waiting.pop(node).writes[node]
        path = [part for part in node.path() if part is node or self._wants(part)]
        num_copied, num_ready, obstacle = 0, 0, None
        self._books.pin(path, +1)  # copying ancestors must not evict what they are copied for
        for part in path:
            if not self._copy(part, may_evict, is_forced):
                break
            num_copied += 1
            if part.host.incoming:
                obstacle = _bringer(part, ("back_up", "fetch"))
            num_ready += obstacle is None
        self._books.pin(path, -1)
        if self._books.is_storage_up:
            obstacle = self._store(path[:num_ready]) or obstacle
        if num_copied == len(path) and obstacle is not None:
            self._waiting[node] = obstacle
            obstacle.writes[node] = None
        return path

    def _copy(self, node: Node, may_evict: bool, is_forced: bool) -> bool:
        """Bring a node to L2 if it is not there, or on its way; False if there is no room."""
        missing = len(node.device.slots) - len(node.host.slots)
        if missing <= 0 or node.host.incoming:
            return True
        if is_forced and self._books.is_storage_up and not self._is_writing():
            may_evict = True  # nothing is under way that would make room by being stored
        if not may_evict and self._books.host_slots.num_free < missing:
            return False
        op = self._room.back_up(node)
        if op is None:
            return False
        op.is_forced, op.is_retry = is_forced, not may_evict
        return True

    def _store(self, nodes: list[Node]) -> Operation | None:
        """Store what is in L2 only, in order, as much as one operation takes.

        Returns the operation after which there is more to store.
        """
        room = self._config.batch_pages
        batch: list[tuple[Node, int]] = []
        is_more, obstacle = False, None
        for node in nodes:
            num_pages = len(node.host.slots) - node.stored - node.storing
            if num_pages <= 0:
                continue
            if not self._is_admitted(node):
                break
            if node.storing:
                obstacle = _bringer(node, ("store",))
                break
            if room == 0:
                is_more = True
                break
            batch.append((node, min(num_pages, room)))
            room -= batch[-1][1]
        op = self._issue(batch) if batch else None
        return op if is_more else obstacle

    def _issue(self, batch: list[tuple[Node, int]]) -> Operation:
        books = self._books
        op = books.begin("store", sum(num_pages for _, num_pages in batch))
        refs: list[PageRef] = []
        source = array("i")
        for node, num_pages in batch:
            first = node.stored
            refs += node.refs(first, first + num_pages)
            source += node.host.slots[first : first + num_pages]
            node.storing = num_pages
            op.spans.append(Span(node, num_pages))
            books.hold(node, "host", op)
        books.actions.append(Store(op.id, batch[0][0].tree.namespace, refs, source))
        return op


def _bringer(node: Node, kinds: tuple[Kind, ...]) -> Operation:
    """The operation of these kinds that brings pages to a node."""
    return next(
        claim for claim in node.claims
        if isinstance(claim, Operation) and any(claim.brings(kind, node) for kind in kinds)
    )  # fmt: skip
