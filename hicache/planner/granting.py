"""Granting: what a request reuses, and L1 slots for that and for what it computes next.

A granted request leases the nodes of its prefix, whole, and owns the private slots behind them.
"""

from array import array
from dataclasses import dataclass, replace

from hicache.actions import CopyPage, Grant, Load, Touch
from hicache.events import OpId, RequestId
from hicache.keys import TOKEN_NBYTES, PageKey
from hicache.planner.hits import explain, hit_tokens
from hicache.planner.operations import Operation, residence
from hicache.planner.requests import Request
from hicache.planner.residency import Residency
from hicache.planner.room import Room
from hicache.planner.weighing import Weighing
from hicache.planner.writes import Writes
from hicache.tree import Node, Partial


@dataclass(frozen=True, slots=True)
class _Hit:
    """What a request can reuse now."""

    path: list[Node]
    """Nodes of whole pages, down to where the hit ends."""
    device: int
    """Leading pages in L1, or on their way there."""
    host: int
    """Leading pages in L1 or L2."""
    partial: Partial | None
    """The page behind those, if its first tokens can be copied."""
    is_load_too_slow: bool
    """Whether L2 has more, which is sooner computed than loaded."""


class Granting:
    """The part of the planner that lets requests run."""

    def __init__(
        self,
        residency: Residency,
        room: Room,
        writes: Writes,
        weighing: Weighing,
        running: dict[RequestId, Request],
    ) -> None:
        self._books = residency
        self._room = room
        self._writes = writes
        self._weighing = weighing
        self._running = running

    def grant(self, request: Request, num_tokens_ahead: int) -> bool:
        """Lend a request its prefix and room to go on; False if there is no room now."""
        hit = self._find(request)
        if self._grant(request, hit, num_tokens_ahead):
            return True
        # The page to copy from keeps the rest of its node from making room.
        return hit.partial is not None and self._grant(
            request, replace(hit, partial=None), num_tokens_ahead
        )

    def _grant(self, request: Request, hit: _Hit, num_tokens_ahead: int) -> bool:
        books = self._books
        num_private = self._num_private(request, hit, num_tokens_ahead)
        books.lease(hit.path, +1)
        source = self._hold_source(hit.partial)
        loading = [node for node in hit.path if node.device.num_pages < node.num_pages]
        books.pin(loading, +1)  # making room for a load must not evict its source
        slots = self._room.take_device(hit.host - hit.device + num_private)
        books.pin(loading, -1)
        if slots is None:
            if source is not None:
                books.end(source)
            books.lease(hit.path, -1)
            return False
        request.lease = hit.path[-1] if hit.path else request.tree.root
        request.committed = hit.host
        self._running[request.id] = request
        if hit.is_load_too_slow:
            request.unused = "recompute_cheaper"
            self._weighing.passed_over_load()
        self._hand_over(request, hit, source, slots)
        return True

    def _find(self, request: Request) -> _Hit:
        """Return what to reuse; cuts nodes so that it ends where one ends."""
        tree = request.tree
        device, host = _reach(request)
        is_too_slow = host > device and self._weighing.is_load_too_slow(host - device)
        if is_too_slow:
            host = device
        node = tree.locate(request.prefix[: host * tree.page_nbytes])
        assert node.end == host
        partial = None if is_too_slow else _partial(request, host)
        return _Hit(node.path(), device, host, partial, is_too_slow)

    def _num_private(self, request: Request, hit: _Hit, num_tokens_ahead: int) -> int:
        page_size = request.tree.page_size
        num_hit = hit.host * page_size + (hit.partial.num_tokens if hit.partial else 0)
        end = min(len(request.tokens) // TOKEN_NBYTES, num_hit + num_tokens_ahead)
        return -(-end // page_size) - hit.host

    def _hold_source(self, partial: Partial | None) -> Operation | None:
        """Hold the page to copy from, before room is made for the copy."""
        if partial is None:
            return None
        op = self._books.begin("copy_page", 1)
        op.held_tier = "device" if partial.index < len(partial.node.device.slots) else "host"
        self._books.hold(partial.node, op.held_tier, op)
        return op

    def _hand_over(
        self, request: Request, hit: _Hit, source: Operation | None, slots: "array[int]"
    ) -> None:
        books, num_loading = self._books, hit.host - hit.device
        loads = self._load(request, hit.path, slots[:num_loading])
        for node in hit.path:
            request.slots += node.device.slots + node.device.incoming
        request.slots += slots[num_loading:]
        if source is not None and hit.partial is not None:
            self._copy(request, source, hit.partial)
            loads.append(source.id)
        self._use(request, hit.path)
        tokens = hit_tokens(request, hit.device, hit.host, hit.partial, source)
        books.actions.append(Grant(request.id, request.slots[:], tokens, tuple(loads)))
        explain(books, request, tokens)

    def _load(self, request: Request, path: list[Node], slots: "array[int]") -> list[OpId]:
        """Start the load of the nodes that are not in L1; return all loads to wait for."""
        books = self._books
        loads = _loading(path)
        if not slots:
            return loads
        op = books.begin("load", len(slots), request.id)
        source, used = array("i"), 0
        for node in path:
            first = len(node.device.slots)
            if node.device.num_pages == node.num_pages:
                continue
            assert not node.device.incoming  # a load brings a node whole
            count = node.num_pages - first
            source += node.host.slots[first:]
            books.hold(node, "host", op)
            books.bring(op, node, slots[used : used + count])
            used += count
        assert used == len(slots) == len(source)
        books.actions.append(Load(op.id, source, slots))
        return [*loads, op.id]

    def _copy(self, request: Request, op: Operation, partial: Partial) -> None:
        source = residence(partial.node, op.held_tier).slots[partial.index]
        target = request.slots[request.committed]
        op.request, op.target, request.copy = request.id, target, op
        self._books.actions.append(
            CopyPage(op.id, op.held_tier, source, target, partial.num_tokens)
        )

    def _use(self, request: Request, path: list[Node]) -> None:
        """Count a use of each node of a path, and pass it on to storage now and then."""
        books, now = self._books, self._books.now
        interval = books.config.touch_interval_s
        keys: list[PageKey] = []
        for node in path:
            node.last_used = now
            node.uses += 1
            node.priority = max(node.priority, request.priority)
            if node.last_user != request.user:
                node.last_user = request.user
                node.users += 1
            self._writes.mark(node)
            if node.stored and books.is_storage_up and now - node.touched >= interval:
                node.touched = now
                keys += node.leading_keys(node.stored)
            books.refresh(node)
        if keys:
            books.actions.append(Touch(request.tree.namespace, keys))


def _loading(path: list[Node]) -> list[OpId]:
    """Return the loads that bring pages to a path and have not ended, each looked at once."""
    loads: set[OpId] = set()
    for node in path:
        for claim in node.claims if node.device.incoming else ():
            if not isinstance(claim, Operation) or claim.has_ended or claim.id in loads:
                continue
            if claim.brings("load", node):
                loads.add(claim.id)
    return sorted(loads)


def _reach(request: Request) -> tuple[int, int]:
    """Return how many leading pages L1 has, and L1 and L2 together."""
    match = request.tree.match(request.prefix)
    device = host = 0
    for node in match.node.path():
        matched = min(match.num_pages - node.start, node.num_pages)
        here = min(node.device.num_pages, matched)  # L1 is prefix-closed
        at_hand = max(here, min(len(node.host.slots), matched))
        device += here
        host += at_hand
        if at_hand < matched:
            break
    return device, host


def _partial(request: Request, num_pages: int) -> Partial | None:
    """Return the page behind the first ``num_pages`` if it can be copied in part."""
    tree = request.tree
    match = tree.match(request.prefix[: num_pages * tree.page_nbytes])
    partial = tree.partial(match, request.tokens[: request.max_hit_tokens * TOKEN_NBYTES])
    if partial is None:
        return None
    node = partial.node
    return partial if partial.index < max(len(node.device.slots), len(node.host.slots)) else None
