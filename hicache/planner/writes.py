"""Writing down: L1 to L2 to L3, ancestors first.

A node is *dirty* while the write policy wants it in a lower tier and it is not there yet. Dirty
nodes are pumped: each pump starts what can start now, and completions pump again. What fails or
finds no room is dropped and counted; eviction from L1 gives it another chance.
"""

from array import array

from hicache.actions import Fact, Store
from hicache.keys import PageRef
from hicache.planner.operations import Operation, Span
from hicache.planner.residency import Residency
from hicache.tree import Node


class Writes:
    """The part of the planner that writes pages down."""

    def __init__(self, residency: Residency) -> None:
        self._books = residency
        self._config = residency.config
        self._dirty: dict[Node, None] = {}
        self._waiting: dict[Node, None] = {}
        """Dirty nodes whose turn comes when a write of an ancestor has ended."""
        self._retry: dict[Node, None] = {}
        """Those whose turn has come. They evict nothing more, or two could evict each other."""
        self._backlog: list[Node] = []
        """Nodes of a sync that wait for room in L2, the next one last."""

        residency.is_pinned = self._is_pinned

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write, and nothing is being written."""
        return not self._backlog and not any(
            op.kind in ("back_up", "store") for op in self._books.operations.values()
        )

    def mark(self, node: Node) -> None:
        """Write a node down, now or as soon as possible, if the policy wants it."""
        if self._config.host_pages and self._config.writing.is_due(node):
            self._dirty[node] = None

    def sync(self) -> None:
        """Write everything down that is not yet, whatever the policy."""
        if self._config.host_pages:
            nodes = [node for tree in self._books.trees.values() for node in tree.nodes()]
            self._backlog = [node for node in reversed(nodes) if self._wants(node)]
            self.pump()

    def pump(self) -> None:
        """Start every write that can start now."""
        while self._dirty or self._retry:
            retry, self._retry = self._retry, {}
            dirty, self._dirty = self._dirty, {}
            for node in dirty:
                if node.parent is not None:
                    self._write(node, may_evict=True)
            for node in retry:
                if node.parent is not None and node not in dirty:
                    self._write(node, may_evict=False)
        while self._backlog:
            node = self._backlog[-1]
            if node.parent is not None and not self._write(node, may_evict=False, is_forced=True):
                return
            self._backlog.pop()

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
                self._waiting.clear()
            elif op.is_forced or self._config.writing.is_due_when_demoted(node):
                (self._retry if op.is_retry else self._dirty)[node] = None
            if node.parent is not None:
                books.settle(node, "host")
                if op.is_demotion and good == expected:
                    self._demoted(node)
        self._retry.update(self._waiting)
        self._waiting.clear()

    def stored(self, op: Operation, outcomes: list[bool], is_returned: bool) -> None:
        """Believe what was stored; the holds end when the backend has let go of the pages."""
        books, done = self._books, 0
        spans, op.spans = op.spans, []
        for span in spans:
            node, mine = span.node, outcomes[done : done + span.num_pages]
            done += span.num_pages
            if node is None:
                continue
            good = mine.index(False) if False in mine else len(mine)
            if node.parent is not None:
                node.storing -= span.num_pages
                node.stored += good
            if good:
                books.facts.append(Fact("stored", "storage", "", good))
            if good < len(mine):
                reason = "store" if is_returned else "late"
                books.facts.append(Fact("failed", "storage", reason, len(mine) - good))
                self._waiting.clear()
            elif node.stored < len(node.host.slots):
                self._dirty[node] = None
            books.unclaim(node, op)
        self._retry.update(self._waiting)
        self._waiting.clear()
        for span in spans:
            if span.node is not None and not span.node.claims:
                books.merge_up(span.node)

    def _demoted(self, node: Node) -> None:
        device = node.device
        if node.leases or device.holds or device.children or device.incoming:
            return
        num_pages = len(device.slots)
        if 0 < num_pages <= len(node.host.slots):
            self._books.trim_device(node, num_pages, "demoted", "room")
            if len(node.children) == 1:
                (child,) = node.children.values()
                self._books.merge_up(child)

    def _is_pinned(self, node: Node) -> bool:
        return bool(self._backlog) or any(
            node in nodes for nodes in (self._dirty, self._waiting, self._retry)
        )

    def _wants(self, node: Node) -> bool:
        target = node.stored + node.storing if self._books.is_storage_up else node.host.num_pages
        return target < max(len(node.device.slots), len(node.host.slots))

    def _write(self, node: Node, *, may_evict: bool, is_forced: bool = False) -> bool:
        """Start what brings a node and its ancestors down.

        A forced write waits for room in L2: then this is False.
        """
        path = [node]
        while (above := path[-1].parent) is not None and not above.is_root and self._wants(above):
            path.append(above)
        path.reverse()
        for part in path:
            part.host.holds += 1  # copying ancestors must not evict what they are copied for
            self._books.refresh(part)
        is_ready, num_ready = True, 0
        for part in path:
            if len(part.host.slots) < len(part.device.slots) and not part.host.incoming:
                if not (may_evict or self._has_room(part, is_forced)):
                    is_ready = False
                    break
                op = self._books.back_up(part, len(part.device.slots))
                if op is None:
                    break
                op.is_forced, op.is_retry = is_forced, not may_evict
            is_ready = is_ready and not part.host.incoming
            num_ready += is_ready
        else:
            self._waiting[node] = None
        for part in path:
            part.host.holds -= 1
            self._books.refresh(part)
        is_all = not self._books.is_storage_up or self._store(path[:num_ready])
        if is_all and is_ready:
            self._waiting.pop(node, None)
        return is_ready or not is_forced or node in self._waiting

    def _has_room(self, node: Node, is_forced: bool) -> bool:
        missing = len(node.device.slots) - len(node.host.slots)
        return self._books.host_slots.num_free >= missing or (is_forced and self._is_hopeless())

    def _is_hopeless(self) -> bool:
        """Whether nothing is under way that could make room in L2 of itself."""
        return not any(op.kind in ("back_up", "store") for op in self._books.operations.values())

    def _store(self, nodes: list[Node]) -> bool:
        """Store the pages of these nodes that are in L2 only; False if that is not all of them."""
        batch: list[tuple[Node, int]] = []
        room, is_all = self._config.batch_pages, True
        for node in nodes:
            if node.storing:
                continue
            num_pages = len(node.host.slots) - node.stored
            if num_pages <= 0:
                continue
            if room == 0:
                is_all = False
                break
            batch.append((node, min(num_pages, room)))
            room -= batch[-1][1]
        if not batch:
            return is_all
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
        return is_all
