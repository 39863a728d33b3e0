"""HiCache on small real pools, with copies and storage that complete when a test says so.

Each page that is computed is filled with bytes made from its page key; each page that is hit must
hold exactly those. So whatever goes wrong between the tiers shows as wrong bytes.
"""

import random
import threading
from array import array
from collections.abc import Sequence
from hashlib import shake_128

import torch

from hicache.actions import Refuse, Wait
from hicache.cache import HiCache, Lease
from hicache.cache.opening import Parts, planner_config
from hicache.config import CacheConfig
from hicache.events import Event, Finished, OpId, Probed, RequestId, Returned
from hicache.keys import NamespaceDigest, PageKey, PageRef, chain, pack
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.planner import Planner
from hicache.pools import DevicePool, HostPool
from hicache.store import PageStore, StoreStats
from hicache.testing.transfers import FakeTransfer


class FakeStore(PageStore):
    """Storage whose operations end when a test says so. Bytes move only then."""

    def __init__(self, host: HostPool, records: dict[PageKey, bytes]) -> None:
        self.wake = threading.Event()
        self.records = records
        self.pending: dict[OpId, tuple[str, Sequence[PageRef] | Sequence[PageKey], array[int]]] = {}
        self.overdue: dict[OpId, array[int]] = {}
        self._host = host
        self._events: list[Event] = []

    def page(self, slot: int) -> memoryview:
        """Return the bytes of a page of L2."""
        nbytes = self._host.page_nbytes
        return self._host.memory[slot * nbytes : (slot + 1) * nbytes]

    def probe(self, op: OpId, namespace: NamespaceDigest, keys: Sequence[PageKey]) -> None:
        """Remember to look for keys."""
        self.pending[op] = ("probe", keys, array("i"))

    def fetch(
        self, op: OpId, namespace: NamespaceDigest, pages: Sequence[PageRef], target: "array[int]"
    ) -> None:
        """Remember to read pages."""
        self.pending[op] = ("fetch", pages, target[:])

    def store(
        self, op: OpId, namespace: NamespaceDigest, pages: Sequence[PageRef], source: "array[int]"
    ) -> None:
        """Remember to write pages."""
        self.pending[op] = ("store", pages, source[:])

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Do nothing: nothing is evicted here."""

    def delete(self, keys: Sequence[PageKey]) -> None:
        """Remove records."""
        for key in keys:
            self.records.pop(key, None)

    def cancel(self, op: OpId) -> None:
        """Do nothing: what is cancelled may end well all the same."""

    def describe(self, namespace: Namespace) -> None:
        """Do nothing."""

    def scan(self, namespace: NamespaceDigest) -> None:
        """Find nothing: probes do."""

    def complete(self, op: OpId, fails: bool = False) -> None:
        """Let an operation end."""
        kind, pages, slots = self.pending.pop(op)
        if kind == "probe":
            found = [not fails and key in self.records for key in pages]
            self._events.append(Probed(op, found))
            return
        outcomes = []
        for page, slot in zip(pages, slots, strict=True):
            assert isinstance(page, PageRef)
            is_good = not fails and (kind == "store" or page.key in self.records)
            if kind == "store" and is_good:
                self.records[page.key] = bytes(self.page(slot))
            elif is_good:
                self.page(slot)[:] = self.records[page.key]
            elif kind == "fetch":
                self.page(slot)[:] = b"\xee" * self._host.page_nbytes
            outcomes.append(is_good)
        self._events.append(Finished(op, outcomes))

    def expire(self, op: OpId) -> None:
        """Let the deadline of a fetch pass: its call goes on."""
        kind, pages, slots = self.pending.pop(op)
        assert kind == "fetch"
        self.overdue[op] = slots
        self._events.append(Finished(op, [False] * len(pages), is_returned=False))

    def come_back(self, op: OpId) -> None:
        """Let an overdue call return, after it has written to its pages."""
        for slot in self.overdue.pop(op):
            self.page(slot)[:] = b"\xdd" * self._host.page_nbytes
        self._events.append(Returned(op))

    def drain(self) -> list[Event]:
        """Return what has ended."""
        events, self._events = self._events, []
        return events

    def flush(self, timeout_s: float | None) -> bool:
        """Say that all is done."""
        return True

    def close(self, timeout_s: float) -> bool:
        """Do nothing."""
        return True

    def stats(self) -> StoreStats:
        """Not here."""
        raise NotImplementedError

    def check(self) -> None:
        """Nothing to check."""


LAYOUT = KVLayout(2, 1, 4, "float32", page_size=2)
NAMESPACE = NamespaceDigest(b"n" * 32)


def content(layout: KVLayout, key: bytes) -> torch.Tensor:
    """Return the bytes that the page of this key has, as a page."""
    return torch.frombuffer(bytearray(shake_128(key).digest(layout.page_nbytes)), dtype=torch.uint8)


def page_bytes(pages: torch.Tensor, slot: int) -> torch.Tensor:
    """Return a page of a pool as bytes."""
    return pages[slot].reshape(-1).view(torch.uint8)


def parts(
    config: CacheConfig, layout: KVLayout, records: dict[PageKey, bytes], device: int, host: int
) -> Parts:
    """Return small pools with transfers and storage that a test completes."""
    device_pool, host_pool = DevicePool(layout, device), HostPool(layout, host)
    planner = Planner(planner_config(layout, config, device, host))
    store = FakeStore(host_pool, records)
    transfer = FakeTransfer(device_pool, host_pool)
    return Parts(planner, device_pool, host_pool, transfer, store, store.wake, config)


class Reader:
    """A request of an engine that computes pages by writing what they must hold."""

    def __init__(
        self,
        cache: HiCache,
        request: int,
        token_ids: Sequence[int],
        namespace: NamespaceDigest = NAMESPACE,
    ) -> None:
        self.cache = cache
        self.id = RequestId(request)
        self.token_ids = list(token_ids)
        self.num_computed = 0
        self.lease: Lease | None = None
        layout = cache.layout
        whole = len(token_ids) // layout.page_size * layout.page_size
        self.keys = chain(namespace, pack(self.token_ids[:whole]), 4 * layout.page_size)
        cache.prefetch(
            self.id, namespace, pack(self.token_ids), max_hit_tokens=max(0, len(token_ids) - 1)
        )

    def try_acquire(self) -> Lease | Wait | Refuse:
        """Ask for the lease."""
        answer = self.cache.acquire(self.id, 1000)
        if isinstance(answer, Lease):
            self.lease = answer
            self.num_computed = answer.hit.total
        return answer

    def acquire(self) -> Lease:
        """Take the lease; nothing in flight is needed for it any more."""
        for _ in range(10_000):
            answer = self.try_acquire()
            if isinstance(answer, Lease):
                return answer
            assert isinstance(answer, Wait), answer
            self.cache.wait_for_progress(0.05)
            self.cache.poll()
        raise AssertionError("never granted")

    def compute(self, num_tokens: int | None = None) -> bool:
        """Check what is reused, compute the next tokens and commit; False after a failed load."""
        lease, layout = self.lease, self.cache.layout
        assert lease is not None
        end = len(self.token_ids)
        if num_tokens is not None:
            end = min(end, self.num_computed + num_tokens)
        if not self.cache.extend(lease, -(-end // layout.page_size)):
            return False
        for layer in range(layout.num_layers):
            lease.wait(layer)
        if not lease.is_intact:
            return False
        self.check()
        first = self.num_computed // layout.page_size
        for index in range(first, end // layout.page_size):
            page_bytes(self.cache.device_pages, lease.slots[index])[:] = content(
                layout, self.keys[index]
            )
        self.num_computed = end
        committed, whole = lease.num_committed_pages, end // layout.page_size
        if whole > committed:
            tokens = self.token_ids[committed * layout.page_size : whole * layout.page_size]
            self.cache.commit(lease, pack(tokens))
        return True

    def check(self) -> None:
        """Assert that the pages reused or computed so far hold what they must, bit by bit."""
        lease, layout = self.lease, self.cache.layout
        assert lease is not None
        for index in range(self.num_computed // layout.page_size):
            found = page_bytes(self.cache.device_pages, lease.slots[index])
            assert torch.equal(found, content(layout, self.keys[index])), f"page {index}"

    def release(self) -> None:
        """Give back everything."""
        self.cache.release(self.id)
        self.lease = None


def tokens_of(seed: int, num_tokens: int, shared: int = 0) -> list[int]:
    """Return token ids whose first ``shared`` are the same for every seed."""
    generator = random.Random(seed)
    return [7] * shared + [generator.randrange(1000) for _ in range(num_tokens - shared)]
