"""Prefetch: L3 to L2, begun when a request arrives, before it is scheduled.

match -> probe the keys beyond what is known -> find host pages for the hits only -> fetch in
batches, each usable as it lands. A prefetch holds one copy of every node of its path. Two
requests that need the same pages wait for the same operations.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from hicache.actions import Cancel, Fact, Fetch, Probe
from hicache.events import OpId
from hicache.keys import KEY_NBYTES, TOKEN_NBYTES, PageKey, PageRef, chain
from hicache.planner.operations import Operation, Prefetch
from hicache.planner.requests import Request
from hicache.planner.residency import Residency
from hicache.rates import Rate
from hicache.tree import Match, Node

_MAX_MISSES = 100_000
"""Keys that storage is remembered not to have."""

_MAX_FETCHING = 0.5
"""Share of L2 that fetches in flight may use."""


class Fetches:
    """The part of the planner that brings pages up from storage."""

    def __init__(self, residency: Residency, prefill: Rate) -> None:
        self._books = residency
        self._config = residency.config
        self._prefill = prefill
        self.rate = Rate()
        """Of fetches, in bytes."""
        self.pending: dict[Prefetch, Request] = {}
        self._probes: dict[OpId, Request] = {}
        self._misses: OrderedDict[PageKey, float] = OrderedDict()

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
        if prefetch.is_blocked:
            self._fetch(request, prefetch)
        if not prefetch.is_pending:
            return False
        if prefetch.waiting_since is None:
            prefetch.waiting_since = books.now
        num_tokens = prefetch.num_pages * self._config.page_size
        patience = self._config.prefetch.patience_s(num_tokens, self._prefill.seconds(num_tokens))
        prefetch.deadline = prefetch.waiting_since + patience
        is_stuck = prefetch.is_blocked and not prefetch.fetches and not books.operations
        if books.now < prefetch.deadline and not is_stuck:
            return True
        books.facts.append(Fact("missed", "storage", "late", prefetch.num_pages, request.id))
        self.stop(request)
        return False

    def stop(self, request: Request) -> None:
        """End a request's prefetch: what has landed stays as any page does, the rest is cancelled.

        Lets go of its path. Harmless where there is none.
        """
        prefetch = request.prefetch
        if prefetch is None:
            return
        if prefetch.probe is not None:
            self._books.actions.append(Cancel(prefetch.probe.id))
        for op in sorted(prefetch.fetches, key=lambda op: op.id):
            if not any(op in other.fetches for other in self.pending if other is not prefetch):
                op.is_cancelled = True
                self._books.actions.append(Cancel(op.id))
        prefetch.probe, prefetch.is_blocked = None, False
        prefetch.fetches.clear()
        self.pending.pop(prefetch, None)
        self._let_go(prefetch)
        request.prefetch = None

    def retry(self) -> None:
        """Try again what found no room."""
        for prefetch, request in list(self.pending.items()):
            if prefetch.is_blocked:
                self._fetch(request, prefetch)

    def give_up_device(self) -> bool:
        """Let go of what waiting requests hold in L1; whether there was anything."""
        gave_up = False
        for prefetch in self.pending:
            for node, tier in [held for held in prefetch.held if held[1] == "device"]:
                prefetch.held.remove((node, tier))
                node.device.holds -= 1
                self._books.unclaim(node, prefetch)
                gave_up = True
        return gave_up

    # ------------------------------------------------------------ what comes back

    def probed(self, op: Operation, found: list[bool]) -> None:
        """Believe what storage says that it has, and fetch it."""
        request = self._probes.pop(op.id, None)
        if request is None or request.prefetch is None or request.prefetch.probe is not op:
            return
        prefetch = request.prefetch
        prefetch.probe = None
        num_found = found.index(False) if False in found else len(found)
        if num_found < len(found):
            self._remember_miss(PageKey(_key(request, request.keys_start + num_found)))
        prefetch.num_pages = 0
        if num_found:
            self.believe(request, request.keys_start + num_found)
        self._fetch(request, prefetch)

    def believe(self, request: Request, num_pages: int) -> None:
        """Note that storage has the pages of a request up to ``num_pages``."""
        tree, nbytes = request.tree, request.tree.page_nbytes
        node = tree.locate(request.prefix[: num_pages * nbytes])
        if node.end < num_pages:
            start = node.end
            child = tree.add(
                node, request.prefix[start * nbytes : num_pages * nbytes], self._books.now
            )
            child.stored = child.num_pages
            if start >= request.keys_start:
                first = (start - request.keys_start) * KEY_NBYTES
                child.keys = request.keys[first : first + child.num_pages * KEY_NBYTES]
        while not node.is_root and node.end > request.keys_start:
            if node.start >= request.keys_start and not node.storing:
                node.stored = node.num_pages
                self._books.refresh(node)
            assert node.parent is not None
            node = node.parent

    def fetched(self, op: Operation, outcomes: list[bool], is_returned: bool) -> None:
        """Take what has landed; heal the belief in what has not."""
        books = self._books
        results = books.arrived(op, outcomes)
        num_good = sum(good for _, good, _ in results)
        if num_good:
            books.facts.append(Fact("fetched", "host", "", num_good, op.request))
            seconds = books.now - op.started
            self.rate.measured(num_good * self._config.page_nbytes, seconds)
        if num_good < op.num_pages and not op.is_cancelled:
            reason = "fetch" if is_returned else "late"
            books.facts.append(Fact("failed", "host", reason, op.num_pages - num_good, op.request))
        for prefetch in self.pending:
            prefetch.fetches.discard(op)
        for node, good, expected in results:
            if good < expected and not op.is_cancelled and not node.storing:
                node.stored = min(node.stored, len(node.host.slots))
            books.settle(node, "storage")

    # ------------------------------------------------------------ parts

    def _hold_path(self, prefetch: Prefetch, match: Match) -> None:
        for node in match.node.path():
            matched = min(match.num_pages - node.start, node.num_pages)
            device, host = len(node.device.slots), len(node.host.slots)
            if device and device >= min(host, matched):
                self._books.hold(node, "device", prefetch)
            elif host:
                self._books.hold(node, "host", prefetch)

    def _let_go(self, prefetch: Prefetch) -> None:
        held, prefetch.held = prefetch.held, []
        for node, tier in held:
            (node.device if tier == "device" else node.host).holds -= 1
        for node, _ in held:
            self._books.unclaim(node, prefetch)

    def _probe(self, request: Request, prefetch: Prefetch, match: Match) -> bool:
        """Ask storage about the pages that the tree does not know; False if there are none."""
        tree, start = request.tree, match.num_pages
        unknown = request.prefix[start * tree.page_nbytes :]
        if not unknown:
            return False
        parent = tree.namespace if match.node.is_root else match.node.key(match.inside - 1)
        if request.keys_start != start or not request.keys:
            if self._is_missing(chain(parent, unknown[: tree.page_nbytes], tree.page_nbytes)[0]):
                return False
            keys = chain(parent, unknown, tree.page_nbytes)
            request.keys, request.keys_start = b"".join(keys), start
        else:
            keys = [
                PageKey(_key(request, start + i)) for i in range(len(unknown) // tree.page_nbytes)
            ]
        op = self._books.begin("probe", len(keys), request.id)
        prefetch.probe, prefetch.num_pages = op, len(keys)
        self._probes[op.id] = request
        self._books.actions.append(Probe(op.id, tree.namespace, keys))
        self._books.facts.append(Fact("probed", "storage", "", len(keys), request.id))
        return True

    def _fetch(self, request: Request, prefetch: Prefetch) -> None:
        """Fetch what is believed stored and not at hand, as far as there is room."""
        prefetch.is_blocked = False
        missing = self._missing(request)
        prefetch.fetches |= missing.joined
        num_pages = sum(last - first for first, last in missing.runs)
        prefetch.num_pages = max(prefetch.num_pages, num_pages + missing.num_arriving)
        if not missing.runs or not self._books.is_storage_up:
            return
        if not prefetch.was_weighed:
            prefetch.was_weighed = True
            if self._is_too_slow(num_pages):
                self._books.facts.append(
                    Fact("missed", "storage", "recompute_cheaper", num_pages, request.id)
                )
                return
        limit = max(1, int(self._config.host_pages * _MAX_FETCHING))
        for first, last in missing.runs:
            while first < last:
                room = limit - self._num_fetching()
                count = min(self._config.batch_pages, last - first, room)
                slots = self._books.take_host(count) if count > 0 else None
                if slots is None:
                    prefetch.is_blocked = True
                    return
                self._issue(request, prefetch, missing.tokens, first, slots)
                first += count

    def _is_too_slow(self, num_pages: int) -> bool:
        """Whether fetching so many pages would take longer than computing them."""
        compute_s = self._prefill.seconds(num_pages * self._config.page_size)
        if not compute_s or self.rate.seconds(num_pages * self._config.page_nbytes) <= compute_s:
            return False
        self.rate.passed_over()
        return True

    def _issue(
        self, request: Request, prefetch: Prefetch, tokens: bytes, first: int, slots: "array[int]"
    ) -> None:
        tree, books = request.tree, self._books
        nbytes, last = tree.page_nbytes, first + len(slots)
        if first:
            tree.locate(tokens[: first * nbytes])
        node = tree.locate(tokens[: last * nbytes])
        assert node.end == last
        nodes: list[Node] = []
        while node.end > first:
            nodes.append(node)
            assert node.parent is not None
            node = node.parent
        op = books.begin("fetch", len(slots), request.id)
        refs: list[PageRef] = []
        used = 0
        for part in reversed(nodes):
            refs += part.refs(0, part.num_pages)
            books.bring(op, part, slots[used : used + part.num_pages])
            books.hold(part, "host", prefetch)
            used += part.num_pages
        prefetch.fetches.add(op)
        books.actions.append(Fetch(op.id, tree.namespace, refs, slots))

    def _missing(self, request: Request) -> "_Missing":
        """Return what is to be fetched: not in L1 or L2, as far as L3 is believed to have it."""
        tree = request.tree
        match = tree.match(request.prefix)
        missing = _Missing(request.prefix)
        for node in match.node.path():
            matched = min(match.num_pages - node.start, node.num_pages)
            if node.host.incoming and len(node.device.slots) < matched:
                fetches = {
                    claim
                    for claim in node.claims
                    if isinstance(claim, Operation) and claim.brings("fetch", node)
                }
                missing.joined |= fetches
                missing.num_arriving += len(node.host.incoming) if fetches else 0
            at_hand = min(max(node.device.num_pages, node.host.num_pages), matched)
            stored = min(node.stored, matched)
            if at_hand < stored:
                missing.add(node.start + at_hand, node.start + stored)
            if max(stored, at_hand) < matched:
                return missing
        partial = tree.partial(match, request.tokens[: request.max_hit_tokens * TOKEN_NBYTES])
        if partial is not None:
            node, index = partial.node, partial.index
            if max(node.device.num_pages, node.host.num_pages) <= index < node.stored:
                missing.add(match.num_pages, match.num_pages + 1)
                missing.tokens = request.prefix[: match.num_pages * tree.page_nbytes]
                missing.tokens += node.page(index)
        return missing

    def _num_fetching(self) -> int:
        return sum(op.num_pages for op in self._books.operations.values() if op.kind == "fetch")

    def _is_missing(self, key: PageKey) -> bool:
        expiry = self._misses.get(key)
        return expiry is not None and self._books.now < expiry

    def _remember_miss(self, key: PageKey) -> None:
        self._misses[key] = self._books.now + self._config.miss_memory_s
        self._misses.move_to_end(key)
        if len(self._misses) > _MAX_MISSES:
            self._misses.popitem(last=False)

    def forget_misses(self) -> None:
        """Ask storage again about everything: it may be another one now."""
        self._misses.clear()


@dataclass(slots=True)
class _Missing:
    """What a request lacks that storage has."""

    tokens: bytes
    """Of the path that the runs are on."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Pages (first, behind the last) to fetch."""
    joined: set[Operation] = field(default_factory=set)
    """Fetches under way on the path."""
    num_arriving: int = 0
    """Pages that these bring."""

    def add(self, first: int, last: int) -> None:
        """Add a run behind the others; joins it with the last where they touch."""
        if self.runs and self.runs[-1][1] == first:
            first = self.runs.pop()[0]
        self.runs.append((first, last))


def _key(request: Request, index: int) -> bytes:
    first = (index - request.keys_start) * KEY_NBYTES
    return request.keys[first : first + KEY_NBYTES]
