"""The planner: state + event + now in, actions out.

Everything that decides is here and in the parts beside it: what to match, admit, demote, fetch,
write down, evict. No tensor, clock, thread or file: ``HiCache`` carries the actions out on pools,
streams and storage, a replay in virtual time, and a test in whatever order it likes.
"""

import math
from collections.abc import Callable

from hicache.actions import Action, Fact, Refuse, Wait
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
from hicache.keys import TOKEN_NBYTES, NamespaceDigest
from hicache.planner.committing import Committing
from hicache.planner.config import PlannerConfig
from hicache.planner.fetches import Fetches
from hicache.planner.granting import Granting
from hicache.planner.keeping import Keeping
from hicache.planner.leases import Leases
from hicache.planner.operations import Operation
from hicache.planner.operators import Operators
from hicache.planner.requests import Request
from hicache.planner.residency import Residency
from hicache.planner.room import Room
from hicache.planner.weighing import Weighing
from hicache.planner.writes import Writes
from hicache.tree import Node, TierPages


class Planner:
    """Decides where pages are. Not thread-safe: one thread, or one replay, owns it."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self.requests: dict[RequestId, Request] = {}
        running: dict[RequestId, Request] = {}
        self._books = books = Residency(config)
        self._weighing = weighing = Weighing(config)
        self._room = room = Room(books)
        self._writes = Writes(books, room)
        self._fetches = Fetches(books, room, weighing)
        self._granting = Granting(books, room, self._writes, weighing, running)
        self._committing = Committing(books, self._writes)
        self._leases = Leases(books, room, self._committing, weighing, running)
        self._keeping = Keeping(books)
        self._operators = Operators(books, room, self._keeping)
        room.release_prefetches = self._fetches.give_up_device
        self._handlers: dict[type[Event], Callable[..., None]] = {
            Arrived: self._arrived,
            Wanted: self._wanted,
            Extended: self._extended,
            Computed: self._computed,
            Released: self._released,
            Finished: self._finished,
            Returned: self._returned,
            Probed: self._probed,
            ChainFound: self._operators.chain_found,
            StorageUp: self._storage_up,
            StorageDown: self._storage_down,
            Flushed: lambda event: room.flush(),
            Synced: lambda event: self._writes.sync(),
            Forgotten: self._operators.forget,
            Kept: self._operators.keep,
            Measured: lambda event: weighing.prefill.measured(event.num_tokens, event.seconds),
            Ticked: lambda event: None,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take note of an event and return what is to be done, in order."""
        books = self._books
        books.now = now
        self._handlers[type(event)](event)
        self._writes.pump()
        self._room.demote_ahead()
        self._keeping.expire()
        books.forget_beliefs()
        actions, books.actions = books.actions, []
        return actions

    def is_waiting(self, request: RequestId, now: float) -> bool:
        """Whether a request that was told to wait for storage would be told so again. O(1).

        Only a speed-up: to ask all the same with ``Wanted`` does no harm.
        """
        prefetch = self.requests[request].prefetch
        return prefetch is not None and self._fetches.is_waiting(prefetch, now)

    def match(self, namespace: NamespaceDigest, tokens: bytes) -> TierPages:
        """Return how many leading pages each tier could give. Changes nothing."""
        tree = self._books.trees.get(namespace)
        return TierPages(0, 0, 0) if tree is None else tree.match(tokens).tiers()

    def next_deadline(self) -> float | None:
        """Return when to send ``Ticked`` at the latest, though nothing else has happened.

        Always after the last event: a deadline that has passed was acted on, or is at the next
        ``Wanted``.
        """
        deadline = min(self._fetches.next_deadline(), self._keeping.next_deadline())
        return None if deadline == math.inf else deadline

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

    def nodes(self, namespace: NamespaceDigest) -> list[Node]:
        """Return the nodes of a namespace, parents first, to look at. O(nodes)."""
        tree = self._books.trees.get(namespace)
        return [] if tree is None else list(tree.nodes())

    def check(self) -> None:
        """Assert every invariant of the planner and its trees. O(nodes)."""
        private = sum(request.num_private for request in self.requests.values())
        self._books.check(self._fetches.pending, private)
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
            event.request if event.continues is None else event.continues,
        )  # fmt: skip
        self.requests[event.request] = request
        self._books.tree_users[event.namespace] += 1
        self._fetches.start(request)

    def _wanted(self, event: Wanted) -> None:
        request, books = self.requests[event.request], self._books
        assert not request.is_granted
        num_pages = -(-len(request.tokens) // request.tree.page_nbytes)
        if num_pages > self.config.device_pages:
            reason = f"needs {num_pages} pages, L1 has {self.config.device_pages}"
            books.actions.append(Refuse(request.id, reason))
            books.facts.append(Fact("refused", "device", "", num_pages, request.id))
        elif self._fetches.must_wait(request):
            books.actions.append(Wait(request.id, "storage"))
        elif self._granting.grant(request, event.num_tokens_ahead):
            self._fetches.stop(request)
        else:
            books.actions.append(Wait(request.id, "demoting" if books.demotions else "device_full"))

    def _extended(self, event: Extended) -> None:
        self._leases.extend(self.requests[event.request], event.num_pages)

    def _computed(self, event: Computed) -> None:
        self._committing.commit(self.requests[event.request], event.tokens)

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
            for ended in self._leases.loaded(op, outcomes, event.seconds):
                self._end(ended)
            return
        if op.kind == "copy_page":
            self._leases.copied(op, all(outcomes))
        elif op.kind == "back_up":
            self._writes.backed_up(op, outcomes)
        elif op.kind == "fetch":
            landed = self._books.now if event.seconds is None else op.started + event.seconds
            self._fetches.fetched(op, outcomes, event.is_returned, landed)
        else:
            assert op.kind == "store"
            self._writes.stored(op, outcomes, event.is_returned)
        self._writes.go_on(op, all(outcomes))
        op.is_overdue = not event.is_returned
        if event.is_returned:
            self._end(op)
        else:
            self._fetches.retry()

    def _returned(self, event: Returned) -> None:
        self._end(self._books.operations[event.op])

    def _probed(self, event: Probed) -> None:
        op = self._books.operations[event.op]
        self._fetches.probed(op, list(event.found))
        self._end(op)

    def _end(self, op: Operation) -> None:
        read = list(op.held)
        self._books.end(op)
        for node in read:
            self._books.merge_around(node)
        self._fetches.retry()

    # ------------------------------------------------------------ storage at large

    def _storage_up(self, event: StorageUp) -> None:
        self._books.is_storage_up = self.config.has_storage
        self._fetches.misses.clear()

    def _storage_down(self, event: StorageDown) -> None:
        self._books.is_storage_up = False
        self._fetches.retry()
