"""HiCache: what an engine talks to.

Five calls and ``poll``: ``match``, ``prefetch``, ``acquire``, ``commit``, ``release`` (and
``extend``). Each tells the planner, and carries out what the planner wants: copies go to
``Transfer``, storage to ``PageStore``, and what comes back from them is told in ``poll``. Nothing
here decides anything, and nothing here waits, but ``flush``, ``sync`` and ``close``.

All calls come from one thread, the engine's step thread, but for ``wake``, ``stats`` and
``explain``.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from hicache.actions import (
    Action,
    BackUp,
    Cancel,
    CopyPage,
    Delete,
    Fetch,
    Grant,
    Grown,
    HitTokens,
    Load,
    Preempt,
    Probe,
    Refuse,
    Revoke,
    Store,
    Touch,
    Wait,
)
from hicache.cache.accounts import Accounts, CacheStats
from hicache.cache.lease import Lease, Polled
from hicache.cache.opening import Parts, open_parts
from hicache.config import CacheConfig
from hicache.errors import TransferError
from hicache.events import (
    Arrived,
    Computed,
    Event,
    Extended,
    Finished,
    Flushed,
    Forgotten,
    Kept,
    Measured,
    Released,
    RequestId,
    Synced,
    Ticked,
    Wanted,
)
from hicache.keys import TOKEN_NBYTES, NamespaceDigest, PageKey
from hicache.layout import KVLayout
from hicache.namespace import Namespace

MAX_NAMESPACES = 10_000
"""Namespaces that are remembered as described in storage."""

CONFIRM_TIMEOUT_S = 60.0
"""How long a load that a forward has already waited for may take to report."""


class HiCache:
    """KV pages in three tiers, shared by all requests of an engine."""

    def __init__(
        self,
        layout: KVLayout,
        config: CacheConfig,
        *,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
        parts: Parts | None = None,
    ) -> None:
        """Reserve L1 and L2 and open storage; raise ``ConfigError`` or ``StorageError``.

        ``parts`` replaces what would be made from ``config``, for tests and replays.
        """
        self.layout = layout
        self.config = config
        self._clock = clock
        self._parts = parts or open_parts(layout, config, device, clock)
        self._planner = self._parts.planner
        self._transfer = self._parts.transfer
        self._store = self._parts.store
        self._wake = self._parts.wake
        self._accounts = Accounts()
        self._leases: dict[RequestId, Lease] = {}
        self._namespaces: OrderedDict[NamespaceDigest, None] = OrderedDict()
        self._requests: dict[RequestId, NamespaceDigest] = {}
        self._revoked: list[Lease] = []
        self._preempted: list[Lease] = []
        self._is_closed = False

    # ------------------------------------------------------------ what the engine calls

    @property
    def device_pages(self) -> Tensor:
        """L1, ``[N, *page_shape]``: the engine reads and writes KV here."""
        return self._parts.device.pages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.layout.page_size

    def open_namespace(self, namespace: Namespace) -> NamespaceDigest:
        """Return the digest under which requests are made; note in storage what it stands for.

        The pages of a namespace without a salt are looked for in the background; a probe finds
        what that has not reached yet. Tenants come by the thousand, and each search reads the
        headers of the whole store: theirs are left to probes.
        """
        digest = namespace.digest
        if digest not in self._namespaces:
            self._namespaces[digest] = None
            if len(self._namespaces) > MAX_NAMESPACES:
                self._namespaces.popitem(last=False)  # described again when it comes back
            if self._store is not None:
                self._store.describe(namespace)
                if namespace.salt is None:
                    self._store.scan(digest)
        self._namespaces.move_to_end(digest)
        return digest

    def match(self, namespace: NamespaceDigest, tokens: bytes) -> HitTokens:
        """Return what a request for these tokens would find now, in whole pages.

        Changes nothing. O(nodes on the path) plus one memcmp of the tokens.
        """
        tiers = self._planner.match(namespace, tokens)
        device, host = tiers.device * self.page_size, tiers.host * self.page_size
        return HitTokens(device, host - device, tiers.storage * self.page_size - host)

    def prefetch(
        self,
        request: RequestId,
        namespace: NamespaceDigest,
        tokens: bytes,
        *,
        max_hit_tokens: int,
        priority: int = 0,
        continues: RequestId | None = None,
    ) -> None:
        """Announce a request, exactly once, so that its pages may be fetched ahead of its turn.

        ``continues``: the id under which it came first, where it was preempted and comes again.
        """
        self._requests[request] = namespace
        self._send(Arrived(request, namespace, tokens, max_hit_tokens, priority, continues))

    def acquire(self, request: RequestId, num_tokens_ahead: int) -> Lease | Wait | Refuse:
        """Lease what a request hits, with slots for that many tokens beyond, at most to its end.

        ``Wait``: ask again after the next ``poll``. ``Refuse``: it can never run in this L1.
        """
        for action in self._send(Wanted(request, num_tokens_ahead)):
            if isinstance(action, Grant):
                return self._leases[request]
            if isinstance(action, Wait | Refuse) and action.request == request:
                return action
        raise AssertionError("the planner did not answer")

    def extend(self, lease: Lease, num_pages: int) -> bool:
        """Make it ``num_pages`` slots in all, appended to ``lease.slots``; False: not now."""
        if num_pages <= len(lease.slots):
            return True
        self._send(Extended(lease.request, num_pages))
        return num_pages <= len(lease.slots)

    def commit(self, lease: Lease, tokens: bytes) -> None:
        """Share the next pages after those committed, whose KV is in the lease's slots.

        ``tokens``: a whole number of pages, packed. Ignored where the lease is not intact.
        """
        if not lease.is_intact:
            return
        lease.num_committed_pages += len(tokens) // (self.page_size * TOKEN_NBYTES)
        assert lease.num_committed_pages <= len(lease.slots)
        self._send(Computed(lease.request, tokens))

    def release(self, request: RequestId) -> None:
        """Take back all that a request has or waits for: it is done, aborted or preempted."""
        self._leases.pop(request, None)
        self._requests.pop(request, None)
        self._send(Released(request))

    def poll(self) -> Polled:
        """Take note of what has finished and start what follows from it. Never blocks."""
        self._take_in()
        deadline = self._planner.next_deadline()
        if deadline is not None and deadline <= self._clock():
            self._send(Ticked())
        if not self._revoked and not self._preempted:
            return _NOTHING
        revoked, self._revoked = self._revoked, []
        preempted, self._preempted = self._preempted, []
        for lease in revoked:
            lease.is_revoked = False
        live = self._leases
        return Polled(
            [lease for lease in revoked if live.get(lease.request) is lease],
            [lease for lease in preempted if live.get(lease.request) is lease],
        )

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Say how long it took to compute so many prompt tokens: what a miss costs."""
        self._send(Measured(num_tokens, seconds))

    def wait_for_progress(self, timeout_s: float) -> None:
        """Sleep until there may be something to poll, or the time is over."""
        if self._transfer.is_polled:
            timeout_s = min(timeout_s, 0.001)
        self._wake.wait(timeout_s)
        self._wake.clear()

    def wake(self) -> None:
        """End a ``wait_for_progress`` at once, or the next one."""
        self._wake.set()

    # ------------------------------------------------------------ what operators call

    def sync(self, timeout_s: float) -> bool:
        """Back up and store all that is not written down yet; whether that was done in time."""
        end = time.monotonic() + timeout_s
        self._send(Synced())
        while not self._planner.is_written:
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            self.wait_for_progress(min(left_s, 0.05))
            self._take_in()
        return True

    def flush(self, timeout_s: float | None) -> None:
        """Empty L1 and L2 of all that no request needs, once it is written down.

        After ``timeout_s`` (30 s if None) what is not written down is dropped. L3 keeps its pages.
        """
        self.sync(30.0 if timeout_s is None else timeout_s)
        self._send(Flushed())

    def forget(self, namespace: NamespaceDigest, tokens: bytes = b"") -> None:
        """Drop a prefix, or the whole namespace, from every tier, but for what is in use."""
        whole = len(tokens) - len(tokens) % (self.page_size * TOKEN_NBYTES)
        self._send(Forgotten(namespace, tokens[:whole]))

    def keep(self, namespace: NamespaceDigest, tokens: bytes, seconds: float) -> None:
        """Keep a prefix that is in L1 or L2 for some time, as far as there is room."""
        self._send(Kept(namespace, tokens, self._clock() + seconds))

    def explain(self, request: RequestId) -> list[str]:
        """Return what happened to a request's pages, a line each. Recent requests only."""
        return self._accounts.explain(request)

    def stats(self) -> CacheStats:
        """Return a snapshot of what has been done, and what is in use."""
        usage, config = self._planner.usage(), self._planner.config
        return CacheStats(
            page_size=self.page_size,
            page_nbytes=self.layout.page_nbytes,
            num_pages={"device": config.device_pages, "host": config.host_pages},
            num_used_pages={"device": usage["device"], "host": usage["host"]},
            pages=dict(self._accounts.pages),
            hit_tokens=self._accounts.hit_tokens,
            num_requests=self._accounts.num_requests,
            num_operations=usage["operations"],
            num_namespaces=usage["namespaces"],
            store=None if self._store is None else self._store.stats(),
        )

    def describe(self) -> list[str]:
        """Return what the cache uses, in a few lines for people."""
        return self._parts.describe()

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write down what is dirty in time and end all threads; False where storage hangs."""
        if self._is_closed:
            return True
        self._is_closed = True
        end = time.monotonic() + timeout_s
        for request in list(self._requests):
            self.release(request)
        self.sync(timeout_s)
        return self._parts.close(max(0.1, end - time.monotonic()))

    def check(self) -> None:
        """Assert the invariants of the planner, and that leases agree with it. For tests."""
        self._planner.check()
        for request, lease in self._leases.items():
            assert self._planner.requests[request].slots == lease.slots

    # ------------------------------------------------------------ events and actions

    def _take_in(self) -> None:
        for finished in self._transfer.drain():
            self._send(finished)
        if self._store is not None:
            for event in self._store.drain():
                self._send(event)

    def _send(self, event: Event) -> list[Action]:
        """Tell the planner, and do what it wants."""
        if isinstance(event, Finished):
            for lease in self._leases.values():
                lease.loads.discard(event.op)
        actions = self._planner.handle(event, self._clock())
        for action in actions:
            self._carry_out(action)
        facts = self._planner.take_facts()
        if facts:
            self._accounts.add(facts)
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case Grant():
                self._grant(action)
            case Grown():
                self._leases[action.request].slots.extend(action.slots)
            case Revoke():
                self._revoke(action)
            case Preempt():
                self._preempted.append(self._leases[action.request])
            case Load():
                self._transfer.load(action.op, action.source, action.target)
            case BackUp():
                self._transfer.back_up(action.op, action.source, action.target)
            case CopyPage():
                self._transfer.copy_page(
                    action.op, action.source_tier, action.source, action.target
                )
            case Wait() | Refuse():
                pass  # answers, which acquire and extend look at
            case _:
                self._carry_out_storage(action)

    def _carry_out_storage(self, action: Action) -> None:
        store = self._store
        assert store is not None, f"there is no storage for {action}"
        match action:
            case Probe():
                store.probe(action.op, action.namespace, action.keys)
            case Fetch():
                store.fetch(action.op, action.namespace, action.pages, action.target)
            case Store():
                store.store(action.op, action.namespace, action.pages, action.source)
            case Touch():
                store.touch([*action.keys, PageKey(action.namespace)])
            case Delete():
                store.delete(action.keys)
            case Cancel():
                store.cancel(action.op)
            case _:
                raise AssertionError(f"unknown action {action}")

    def _grant(self, grant: Grant) -> None:
        self._accounts.granted(grant.hit)
        self._leases[grant.request] = Lease(
            request=grant.request,
            namespace=self._requests[grant.request],
            slots=array("i", grant.slots),
            hit=grant.hit,
            num_committed_pages=grant.hit.total // self.page_size,
            num_valid_tokens=grant.hit.total,
            loads=set(grant.loads),
            wait_for_load=self._transfer.wait,
            confirm=self._confirm,
        )

    def _revoke(self, revoke: Revoke) -> None:
        lease = self._leases[revoke.request]
        lease.num_valid_tokens = revoke.num_tokens
        lease.num_committed_pages = revoke.num_tokens // self.page_size
        del lease.slots[len(revoke.slots) :]
        assert lease.slots == revoke.slots
        # Its other loads go on: what they bring may be among the tokens that stay valid.
        lease.is_revoked = True
        self._revoked.append(lease)

    def _confirm(self, lease: Lease) -> None:
        """Take note of how the loads of a lease ended; the forward has waited for them."""
        end = time.monotonic() + CONFIRM_TIMEOUT_S
        while True:
            for event in self._transfer.drain():
                self._send(event)
            if not lease.loads:
                return
            if time.monotonic() > end:
                raise TransferError(f"a load did not end in {CONFIRM_TIMEOUT_S:g} s")
            self.wait_for_progress(0.001)


_NOTHING = Polled((), ())
