"""The planner: state + event + now in, actions out.

Everything that decides is here and in the parts beside it: what to match, admit, demote, fetch,
write down, evict. No tensor, clock, thread or file: ``HiCache`` carries the actions out on pools,
streams and storage, a replay in virtual time, and a test in whatever order it likes.
"""

from collections.abc import Callable

from hicache.actions import Action, Delete, Fact, Refuse, Wait
from hicache.events import (
    Arrived,
    ChainFound,
    Computed,
    Event,
    Extended,
    Finished,
    Flushed,
    Forgotten,
    Kept,
    Measured,
    Probed,
    Released,
    RequestId,
    Returned,
    StorageDown,
    StorageUp,
    Synced,
    Ticked,
    Wanted,
)
from hicache.keys import TOKEN_NBYTES, NamespaceDigest, PageKey
from hicache.planner.fetches import Fetches
from hicache.planner.leases import Leases
from hicache.planner.operations import Operation
from hicache.planner.requests import Request
from hicache.planner.residency import PlannerConfig, Residency
from hicache.planner.writes import Writes
from hicache.rates import Rate
from hicache.tree import Node, TierPages

MAX_KEPT = 0.5
"""Share of L1, and of L2, that ``Kept`` may protect."""


class Planner:
    """Decides where pages are. Not thread-safe: one thread, or one replay, owns it."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self.requests: dict[RequestId, Request] = {}
        self.prefill = Rate(config.prefill_tokens_per_s)
        self._books = Residency(config)
        self._writes = Writes(self._books)
        self._fetches = Fetches(self._books, self.prefill)
        self._leases = Leases(self._books, self._writes, self.prefill, self.requests)
        self._books.release_prefetches = self._fetches.give_up_device
        self._handlers: dict[type[Event], Callable[..., None]] = {
            Arrived: self._arrived,
            Wanted: self._wanted,
            Extended: self._extended,
            Computed: self._computed,
            Released: self._released,
            Finished: self._finished,
            Returned: self._returned,
            Probed: self._probed,
            ChainFound: self._chain_found,
            StorageUp: self._storage_up,
            StorageDown: self._storage_down,
            Flushed: self._flushed,
            Synced: lambda event: self._writes.sync(),
            Forgotten: self._forgotten,
            Kept: self._kept,
            Measured: lambda event: self.prefill.measured(event.num_tokens, event.seconds),
            Ticked: lambda event: None,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take note of an event and return what is to be done, in order."""
        books = self._books
        books.now = now
        self._handlers[type(event)](event)
        self._writes.pump()
        books.demote_ahead()
        self._expire()
        actions, books.actions = books.actions, []
        return actions

    def match(self, namespace: NamespaceDigest, tokens: bytes) -> TierPages:
        """Return how many leading pages each tier could give. Changes nothing."""
        tree = self._books.trees.get(namespace)
        return TierPages(0, 0, 0) if tree is None else tree.match(tokens).tiers()

    def next_deadline(self) -> float | None:
        """Return when to send ``Ticked`` at the latest, though nothing else has happened."""
        deadlines = [p.deadline for p in self._fetches.pending if p.deadline is not None]
        deadlines += [node.kept_until for node in self._books.kept]
        return min(deadlines, default=None)

    def take_facts(self) -> list[Fact]:
        """Return what has happened since the last call."""
        facts, self._books.facts = self._books.facts, []
        return facts

    @property
    def is_written(self) -> bool:
        """Whether nothing is being written down, or waits to be."""
        return self._writes.is_idle

    def usage(self) -> dict[str, int]:
        """Return pages in use, by tier, and what is in flight."""
        books = self._books
        return {
            "device": self.config.device_pages - books.device_slots.num_free,
            "host": self.config.host_pages - books.host_slots.num_free,
            "operations": len(books.operations),
            "requests": len(self.requests),
            "namespaces": len(books.trees),
        }

    def check(self) -> None:
        """Assert every invariant of the planner and its trees. O(nodes)."""
        private = sum(request.num_private for request in self.requests.values())
        self._books.check(list(self._fetches.pending), private)
        for request in self.requests.values():
            node = request.lease
            assert node is None or node.end == request.committed
            assert request.committed <= len(request.slots)
        used = [slot for request in self.requests.values() for slot in self._private(request)]
        assert len(used) == len(set(used)), "a private slot of two requests"

    def _private(self, request: Request) -> list[int]:
        behind = request.slots[request.committed :].tolist()
        return behind + [request.slots[index] for index in request.duplicates]

    # ------------------------------------------------------------ requests

    def _arrived(self, event: Arrived) -> None:
        assert event.request not in self.requests
        tree = self._books.tree(event.namespace)
        num_pages = min(event.max_hit_tokens, len(event.tokens) // TOKEN_NBYTES) // tree.page_size
        request = Request(
            event.request, tree, event.tokens, event.tokens[: num_pages * tree.page_nbytes],
            event.max_hit_tokens, event.priority,
        )  # fmt: skip
        self.requests[event.request] = request
        self._books.tree_users[event.namespace] += 1
        self._fetches.start(request)

    def _wanted(self, event: Wanted) -> None:
        request = self.requests[event.request]
        assert not request.is_granted
        num_pages = -(-len(request.tokens) // request.tree.page_nbytes)
        if num_pages > self.config.device_pages:
            reason = f"needs {num_pages} pages, L1 has {self.config.device_pages}"
            self._books.actions.append(Refuse(request.id, reason))
            self._books.facts.append(Fact("refused", "device", "", num_pages, request.id))
        elif self._fetches.must_wait(request):
            self._books.actions.append(Wait(request.id, "storage"))
        elif self._leases.grant(request, event.num_tokens_ahead):
            self._fetches.stop(request)
        else:
            is_coming = self._books.coming > self._books.device_slots.num_free
            self._books.actions.append(Wait(request.id, "demoting" if is_coming else "device_full"))

    def _extended(self, event: Extended) -> None:
        self._leases.extend(self.requests[event.request], event.num_pages)

    def _computed(self, event: Computed) -> None:
        self._leases.commit(self.requests[event.request], event.tokens)

    def _released(self, event: Released) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        self._fetches.stop(request)
        if request.is_granted:
            self._leases.release(request)
        del self.requests[request.id]
        self._books.tree_users[request.tree.namespace] -= 1
        self._books.drop_if_empty(request.tree)
        self._fetches.retry()

    # ------------------------------------------------------------ operations

    def _finished(self, event: Finished) -> None:
        op = self._books.operations[event.op]
        outcomes = list(event.outcomes)
        assert len(outcomes) == op.num_pages
        if op.kind == "load":
            self._leases.loaded(op, outcomes)
        elif op.kind == "copy_page":
            self._leases.copied(op, all(outcomes))
        elif op.kind == "back_up":
            self._writes.backed_up(op, outcomes)
        elif op.kind == "fetch":
            self._fetches.fetched(op, outcomes, event.is_returned)
        else:
            assert op.kind == "store"
            self._writes.stored(op, outcomes, event.is_returned)
        if event.is_returned:
            self._end(op)
        else:
            op.is_overdue = True

    def _returned(self, event: Returned) -> None:
        self._end(self._books.operations[event.op])

    def _probed(self, event: Probed) -> None:
        op = self._books.operations[event.op]
        self._fetches.probed(op, list(event.found))
        self._end(op)

    def _end(self, op: Operation) -> None:
        self._books.end(op)
        self._fetches.retry()

    # ------------------------------------------------------------ storage at large

    def _chain_found(self, event: ChainFound) -> None:
        tree = self._books.tree(event.namespace)
        node = tree.locate(event.tokens)
        known = node.end
        if known * tree.page_nbytes < len(event.tokens):
            node = tree.add(node, event.tokens[known * tree.page_nbytes :], self._books.now)
            node.keys = b"".join(event.keys[known:])
        while not node.is_root:
            if not node.storing:
                node.stored = node.num_pages
                self._books.refresh(node)
            assert node.parent is not None
            node = node.parent

    def _storage_up(self, event: StorageUp) -> None:
        self._books.is_storage_up = self.config.has_storage
        self._fetches.forget_misses()

    def _storage_down(self, event: StorageDown) -> None:
        self._books.is_storage_up = False
        self._fetches.retry()

    # ------------------------------------------------------------ operators

    def _flushed(self, event: Flushed) -> None:
        books = self._books
        books.unkeep(list(books.kept))
        books.release_prefetches()
        while (node := books.device_order.first()) is not None:
            books.trim_device(node, len(node.device.slots), "evicted", "flush")
        books.flush_host()

    def _forgotten(self, event: Forgotten) -> None:
        tree = self._books.trees.get(event.namespace)
        if tree is None:
            return
        top = tree.locate(event.tokens) if event.tokens else tree.root
        if event.tokens and top.end * tree.page_nbytes < len(event.tokens):
            return
        nodes = list(tree.root.children.values()) if top.is_root else [top]
        for node in nodes:
            nodes.extend(node.children.values())
        keys: list[PageKey] = []
        for node in reversed(nodes):
            keys += [node.key(index) for index in range(node.stored)]
            if not node.children:  # else something below is needed, and this leads to it
                node.stored = node.stored if node.storing else 0
                self._books.drop_copies(node)
        if keys:
            self._books.actions.append(Delete(keys))

    def _kept(self, event: Kept) -> None:
        tree = self._books.trees.get(event.namespace)
        if tree is None:
            return
        match = tree.match(event.tokens)
        nbytes = match.num_pages * tree.page_nbytes
        path = tree.locate(event.tokens[:nbytes]).path() if nbytes else []
        room = int(self.config.device_pages * MAX_KEPT) - self._num_kept()
        for node in path:
            room -= node.num_pages
            if room < 0:
                return
            node.kept_until = max(node.kept_until, event.until)
            self._books.kept.add(node)
            self._books.refresh(node)

    def _num_kept(self) -> int:
        return sum(node.num_pages for node in self._books.kept)

    def _expire(self) -> None:
        kept = self._books.kept
        if kept:
            self._books.unkeep([node for node in kept if node.kept_until <= self._books.now])

    def nodes(self, namespace: NamespaceDigest) -> list[Node]:
        """Return the nodes of a namespace, parents first, to look at. O(nodes)."""
        tree = self._books.trees.get(namespace)
        return [] if tree is None else list(tree.nodes())
