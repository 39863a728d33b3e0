"""Prefetch: L3 to L2, begun when a request arrives, before it is scheduled.

match -> probe the keys beyond what is known -> find host pages for the hits only -> fetch in
batches, each usable as it lands. A prefetch holds one copy of every node of its path. Two
requests that need the same pages wait for the same operations.
"""

import heapq
import math
from array import array

from hicache.actions import Cancel, Fact, Fetch, Probe
from hicache.events import OpId, RequestId
from hicache.keys import KEY_NBYTES, PageKey, PageRef, chain
from hicache.planner.misses import Misses
from hicache.planner.missing import find_missing
from hicache.planner.operations import Operation, Prefetch
from hicache.planner.requests import Request
from hicache.planner.residency import Residency, leading
from hicache.planner.room import Room
from hicache.planner.weighing import Weighing
from hicache.tree import NO_SLOTS, Match

_MAX_FETCHING = 0.5
"""Share of L2 that fetches in flight may use."""


class Fetches:
    """The part of the planner that brings pages up from storage."""

    def __init__(self, residency: Residency, room: Room, weighing: Weighing) -> None:
        self._books = residency
        self._room = room
        self._config = residency.config
        self._weighing = weighing
        self.misses = Misses(self._config.miss_memory_s)
        self.pending: dict[Prefetch, Request] = {}
        self._blocked: dict[Prefetch, Request] = {}
        self._in_device: dict[Prefetch, None] = {}
        """Those that hold pages of L1."""
        self._probes: dict[OpId, Request] = {}
        self._deadlines: list[tuple[float, RequestId, Prefetch]] = []
        """A heap; entries of prefetches that have ended, or wait longer now, stay in it."""

    # ------------------------------------------------------------ the life of a prefetch

    def start(self, request: Request) -> None:
        """Begin to bring up what storage has of a request."""
        match = request.tree.match(request.prefix)
        request.local_pages = match.tiers().host
        if not self._books.is_storage_up:
            return
        prefetch = Prefetch(request.id)
        request.prefetch = prefetch
        self.pending[prefetch] = request
        self._hold_path(prefetch, match)
        if not self._probe(request, prefetch, match):
            self._fetch(request, prefetch)

    def must_wait(self, request: Request) -> bool:
        """Whether a request that could run now should rather wait for storage."""
        prefetch, books = request.prefetch, self._books
        if prefetch is None:
            return False
        was_blocked, prefetch.is_wanted = prefetch.is_blocked, True
        if was_blocked:
            self._fetch(request, prefetch)
        elif not prefetch.is_pending and not request.unused:
            self._fetch_again(request, prefetch)
        if not prefetch.is_pending:
            return False
        if prefetch.is_blocked and not self._is_first(request):
            return True  # those before it have the room, and will leave it
        if prefetch.waiting_since is None or (was_blocked and not prefetch.is_blocked):
            prefetch.waiting_since = books.now
        prefetch.awaited_pages = prefetch.num_pages
        deadline = prefetch.waiting_since + self._weighing.patience_s(prefetch.num_pages)
        if deadline != prefetch.deadline:
            prefetch.deadline = deadline
            if deadline < math.inf:
                heapq.heappush(self._deadlines, (deadline, request.id, prefetch))
        is_stuck = (
            prefetch.is_blocked
            and not prefetch.fetches
            and all(op.is_overdue for op in books.operations.values())
        )
        if books.now < deadline and not is_stuck:
            return True
        request.unused = "no_room" if prefetch.is_blocked else "late"
        return False  # what lands before L1 has room is used all the same

    def is_waiting(self, prefetch: Prefetch, now: float) -> bool:
        """Whether ``must_wait`` would say so again: nothing has changed since it last did."""
        return (
            prefetch.is_pending
            and not prefetch.is_blocked
            and prefetch.deadline is not None
            and now < prefetch.deadline
            and prefetch.num_pages == prefetch.awaited_pages
        )

    def _fetch_again(self, request: Request, prefetch: Prefetch) -> None:
        """Fetch what was at hand when a request came, and has gone while it waited for its turn."""
        self._fetch(request, prefetch)
        if prefetch.is_pending:
            at_hand = request.tree.match(request.prefix).tiers().host
            request.local_pages = min(request.local_pages, at_hand)
            prefetch.waiting_since = None

    def stop(self, request: Request) -> None:
        """End a request's prefetch: what has landed stays as any page does, the rest is cancelled.

        Also what lands in spite of that stays. Lets go of the path. Harmless where there is none.
        """
        prefetch = request.prefetch
        if prefetch is None:
            return
        if prefetch.probe is not None:
            self._books.actions.append(Cancel(prefetch.probe.id))
        for op in prefetch.fetches:
            del op.prefetches[prefetch]
            if not op.prefetches:
                op.is_cancelled = True
                self._books.actions.append(Cancel(op.id))
        prefetch.probe = None
        prefetch.fetches.clear()
        self._block(request, prefetch, False)
        del self.pending[prefetch]
        self._let_go(prefetch)
        request.prefetch = None

    def retry(self) -> None:
        """Try again what found no room, first come first served, until there is none again."""
        for prefetch, request in list(self._blocked.items()):
            self._fetch(request, prefetch)
            if prefetch.is_blocked:
                return

    def give_up_device(self) -> bool:
        """Let go of what waiting requests hold in L1; whether there was anything."""
        holders, self._in_device = self._in_device, {}
        for prefetch in holders:
            held = [node for node, tier in prefetch.held if tier == "device"]
            prefetch.held = [(node, tier) for node, tier in prefetch.held if tier != "device"]
            for node in held:
                node.device.holds -= 1
                self._books.unclaim(node, prefetch)
        return bool(holders)

    def next_deadline(self) -> float:
        """Return when a request stops waiting; infinity where none will."""
        heap = self._deadlines
        while heap and (heap[0][0] <= self._books.now or not self._is_due(heap[0][2], heap[0][0])):
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def _is_due(self, prefetch: Prefetch, deadline: float) -> bool:
        return prefetch in self.pending and prefetch.deadline == deadline

    # ------------------------------------------------------------ what comes back

    def probed(self, op: Operation, found: list[bool]) -> None:
        """Believe what storage says that it has, and fetch it."""
        request = self._probes.pop(op.id)
        prefetch = request.prefetch
        if prefetch is None:
            return
        prefetch.probe = None
        num_found = leading(found)
        if num_found < len(found):
            start = num_found * KEY_NBYTES
            key = PageKey(request.keys[start : start + KEY_NBYTES])
            self.misses.add(key, self._books.now)
        prefetch.num_pages = 0
        if num_found:
            self._believe(request, request.keys_start + num_found)
        self._fetch(request, prefetch)

    def fetched(
        self, op: Operation, outcomes: list[bool], is_returned: bool, landed: float
    ) -> None:
        """Take what has landed, at the time ``landed``; heal the belief in what has not."""
        books = self._books
        results = books.arrived(op, outcomes)
        num_good = sum(good for _, good, _ in results)
        if num_good:
            books.facts.append(Fact("fetched", "host", "", num_good, op.request))
            self._weighing.fetched(num_good, op.started, landed)
        if num_good < op.num_pages and not op.is_cancelled:
            reason = "fetch" if is_returned else "late"
            books.facts.append(Fact("failed", "host", reason, op.num_pages - num_good, op.request))
        for prefetch in op.prefetches:
            del prefetch.fetches[op]
            if op.is_cancelled:  # by another, before this one joined: fetch the rest again
                self._block(self.pending[prefetch], prefetch, True)
        op.prefetches.clear()
        for node, good, expected in results:
            if good < expected and not (op.is_cancelled or node.storing):
                node.stored = min(node.stored, len(node.host.slots))
            books.settle(node, "storage")

    def _believe(self, request: Request, num_pages: int) -> None:
        """Note that storage has the pages of a request from ``keys_start`` up to ``num_pages``."""
        tree, nbytes, first = request.tree, request.tree.page_nbytes, request.keys_start
        node = tree.locate(request.prefix[: num_pages * nbytes])
        if node.end < first:
            return  # what was known then has gone: nothing leads there
        if node.end < num_pages:
            start = node.end
            tokens = request.prefix[start * nbytes : num_pages * nbytes]
            child = tree.add(node, tokens, self._books.now)
            child.stored = child.num_pages
            child.keys = request.keys[
                (start - first) * KEY_NBYTES : (num_pages - first) * KEY_NBYTES
            ]
            self._books.refresh(child)
            self._books.refresh(node)
        while node.start >= first and not node.is_root:
            if not node.storing:
                node.stored = node.num_pages
                self._books.refresh(node)
            assert node.parent is not None
            node = node.parent

    # ------------------------------------------------------------ parts

    def _hold_path(self, prefetch: Prefetch, match: Match) -> None:
        for node in match.node.path():
            matched = min(match.num_pages - node.start, node.num_pages)
            device, host = len(node.device.slots), len(node.host.slots)
            if device and device >= min(host, matched):
                self._books.hold(node, "device", prefetch)
                self._in_device[prefetch] = None
            elif host:
                self._books.hold(node, "host", prefetch)

    def _let_go(self, prefetch: Prefetch) -> None:
        held, prefetch.held = prefetch.held, []
        for node, tier in held:
            (node.device if tier == "device" else node.host).holds -= 1
        for node, _ in held:
            self._books.unclaim(node, prefetch)
        self._in_device.pop(prefetch, None)

    def _block(self, request: Request, prefetch: Prefetch, is_blocked: bool) -> None:
        prefetch.is_blocked = is_blocked
        if is_blocked:
            self._blocked[prefetch] = request
        else:
            self._blocked.pop(prefetch, None)

    def _probe(self, request: Request, prefetch: Prefetch, match: Match) -> bool:
        """Ask storage about the pages that the tree does not know; False if there are none."""
        tree, books = request.tree, self._books
        unknown = request.prefix[match.num_pages * tree.page_nbytes :]
        if not unknown:
            return False
        parent = tree.namespace if match.node.is_root else match.node.key(match.inside - 1)
        (first,) = chain(parent, unknown[: tree.page_nbytes], tree.page_nbytes)
        if self.misses.has(first, books.now):
            return False
        keys = chain(parent, unknown, tree.page_nbytes)
        request.keys, request.keys_start = b"".join(keys), match.num_pages
        op = books.begin("probe", len(keys), request.id)
        prefetch.probe, prefetch.num_pages = op, len(keys)
        self._probes[op.id] = request
        books.actions.append(Probe(op.id, tree.namespace, keys))
        books.facts.append(Fact("probed", "storage", "", len(keys), request.id))
        return True

    def _fetch(self, request: Request, prefetch: Prefetch) -> None:
        """Fetch what is believed stored and not at hand, as far as there is room."""
        self._block(request, prefetch, False)
        missing = find_missing(request)
        for op in missing.joined:
            op.prefetches[prefetch] = prefetch.fetches[op] = None
        num_pages = missing.num_pages
        prefetch.num_pages = max(prefetch.num_pages, num_pages + missing.num_arriving)
        if not num_pages or not self._books.is_storage_up:
            return
        request.fetched_partial = missing.partial
        if not prefetch.was_weighed:
            prefetch.was_weighed = True
            if self._weighing.is_fetch_too_slow(num_pages):
                self._weighing.passed_over_fetch()
                request.unused = "recompute_cheaper"
                return
        nbytes = request.tree.page_nbytes
        for first, last in missing.runs:
            while first < last:
                end = min(first + self._config.batch_pages, last)
                slots = self._take(request, missing.tokens[: end * nbytes], end - first)
                if not slots:
                    self._block(request, prefetch, True)
                    return
                self._issue(request, prefetch, missing.tokens, first, slots)
                first += len(slots)

    def _take(self, request: Request, tokens: bytes, num_pages: int) -> "array[int]":
        """Return host pages to fetch into: as many as there is room for, at most ``num_pages``.

        The path to ``tokens`` does not make the room.
        """
        books = self._books
        fetching = sum(op.num_pages for op in books.operations.values() if op.kind == "fetch")
        limit = max(1, int(self._config.host_pages * _MAX_FETCHING))
        num_pages = min(num_pages, limit - fetching)
        if num_pages <= 0:
            return NO_SLOTS
        path = request.tree.match(tokens).node.path()
        books.pin(path, +1)
        slots = self._room.take_host(num_pages)
        if slots is None and request.prefetch is not None and request.prefetch.is_wanted:
            slots = self._take_from_later(request, num_pages)
        books.pin(path, -1)
        if slots is None:  # all that may be evicted has been
            slots = books.host_slots.allocate(books.host_slots.num_free)
            assert slots is not None
        return slots

    def _take_from_later(self, request: Request, num_pages: int) -> "array[int] | None":
        """Return host pages that requests behind this one hold, the last one's first.

        They fetch them again when there is room.
        """
        behind = [other for other in self.pending.values() if _rank(other) > _rank(request)]
        for other in sorted(behind, key=_rank, reverse=True):
            prefetch = other.prefetch
            assert prefetch is not None
            if prefetch.fetches or not any(tier == "host" for _, tier in prefetch.held):
                continue
            self._let_go(prefetch)
            self._block(other, prefetch, True)
            slots = self._room.take_host(num_pages)
            if slots is not None:
                return slots
        return None

    def _is_first(self, request: Request) -> bool:
        """Whether no request waits that came before, or matters more."""
        return all(_rank(request) <= _rank(other) for other in self.pending.values())

    def _issue(
        self, request: Request, prefetch: Prefetch, tokens: bytes, first: int, slots: "array[int]"
    ) -> None:
        tree, books = request.tree, self._books
        nbytes, last = tree.page_nbytes, first + len(slots)
        tree.locate(tokens[: first * nbytes])  # cuts where the run begins
        node = tree.locate(tokens[: last * nbytes])
        assert node.end == last
        op = books.begin("fetch", len(slots), request.id)
        refs: list[PageRef] = []
        used = 0
        for part in [part for part in node.path() if part.start >= first]:
            refs += part.refs(0, part.num_pages)
            books.bring(op, part, slots[used : used + part.num_pages])
            books.hold(part, "host", prefetch)
            used += part.num_pages
        op.prefetches[prefetch] = prefetch.fetches[op] = None
        books.actions.append(Fetch(op.id, tree.namespace, refs, slots))


def _rank(request: Request) -> tuple[int, RequestId]:
    return -request.priority, request.id
