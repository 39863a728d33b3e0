"""L3 as the step thread sees it: fetch, store, probe; and events to drain.

Nothing here blocks the caller but ``start``, ``flush`` and ``close``. The conversation with the
backend runs on one event loop in one thread. Whatever a backend does, every operation ends with
exactly one ``Finished`` or ``Probed``, and a page counts as fetched only if it was proved.
"""

import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache.codec import PageCodec, encode_namespace, open_keyring
from hicache.config import StorageConfig
from hicache.errors import ConfigError, HiCacheError, StorageError, StorageUnavailable
from hicache.events import Event, OpId
from hicache.keys import NamespaceDigest, PageKey, PageRef
from hicache.namespace import Namespace
from hicache.storage import StorageBackend
from hicache.store.conductor import Conductor
from hicache.store.counters import StoreStats
from hicache.store.ledger import Ledger
from hicache.store.operations import AWAITED, KINDS, Operation

log = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_STALL_S = 1.0
"""A deadline that the loop has missed by this much means that a backend blocks it."""
_CHAIN_PAGES = 512
"""Pages of scanned chains that one ``drain`` gives, about: the rest comes with the next."""
_MAX_DESCRIPTORS = 1024
"""Namespaces whose descriptor is remembered until it is known to be stored."""
_CLOSE_S = 1.0
"""What closing the backend may take beyond the time that the stores were given."""


class PageStore:
    """L3: pages in storage, believed only when proved.

    ``memory`` is the host pool, flat. A page of it that is the target of a fetch, or the source of
    a store, belongs to the operation until ``Finished`` with ``is_returned``, or ``Returned``.
    All methods belong to one thread, except ``stats``.
    """

    def __init__(
        self,
        backend: StorageBackend,
        memory: memoryview,
        page_nbytes: int,
        config: StorageConfig,
        *,
        page_size: int,
        item_nbytes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``item_nbytes``: of one number of KV, for codecs. Raises ``ConfigError``."""
        if page_nbytes % backend.alignment:
            raise ConfigError(
                f"pages of {page_nbytes} bytes are no multiple of the {backend.alignment} bytes "
                f"that {type(backend).__name__} needs"
            )
        self.wake = threading.Event()
        """Set when there is something to drain; whoever waits for it clears it."""
        self._clock = clock
        self._is_stalled = False
        self._has_scanned = False
        self._deadline_s = config.deadline_s
        self._late_since: float | None = None
        self._name = type(backend).__name__
        self._codec = PageCodec(
            page_size, page_nbytes, backend.alignment,
            codec=config.codec, level=config.codec_level, item_nbytes=item_nbytes,
            keyring=open_keyring(config),
        )  # fmt: skip
        self._num_pages = len(memory) // page_nbytes
        self._ledger = Ledger(
            self._num_pages,
            max_batch=backend.max_batch,
            max_calls=config.concurrency,
            max_queued=config.queue_pages,
            deadline_s=config.deadline_s,
            clock=clock,
            wake=self.wake,
        )
        self._descriptors: dict[NamespaceDigest, Operation] = {}
        """The last try at each descriptor that is not known to be stored."""
        self._described: dict[PageKey, None] = {}
        """The descriptors of namespaces that were described last."""
        self._conductor = Conductor(
            backend, self._codec, memory, self._ledger, config, clock=clock, wake=self.wake
        )

    def start(self, timeout_s: float = 60.0) -> None:
        """Open the backend. Raises ``ConfigError`` or ``StorageError`` in one line."""
        self._conductor.start()
        try:
            self._conductor.opened.result(timeout_s)
        except HiCacheError:
            raise
        except TimeoutError:
            raise StorageUnavailable(f"{self._name} did not open in {timeout_s:g} s") from None
        except BaseException as error:
            raise StorageError(f"{self._name}: {type(error).__name__}: {error}") from error

    # ------------------------------------------------------------ operations

    def probe(self, op: OpId, namespace: NamespaceDigest, keys: Sequence[PageKey]) -> None:
        """Ask which keys storage has. Ends with ``Probed``."""
        self._submit(Operation("probe", keys, op, namespace))

    def fetch(
        self,
        op: OpId,
        namespace: NamespaceDigest,
        pages: Sequence[PageRef],
        target: "array[int]",
    ) -> None:
        """Read pages into the slots ``target``. Ends with ``Finished``.

        An outcome is True only where the page now holds, bit for bit, what was stored for exactly
        these tokens in this namespace. Where it is False the page may hold anything.
        """
        self._check_slots(pages, target)
        keys = [page.key for page in pages]
        self._submit(Operation("fetch", keys, op, namespace, pages, target))

    def store(
        self,
        op: OpId,
        namespace: NamespaceDigest,
        pages: Sequence[PageRef],
        source: "array[int]",
    ) -> None:
        """Write the pages in the slots ``source``, where they are not there yet.

        Ends with ``Finished``. What does not fit into the queue is dropped.
        """
        self._check_slots(pages, source)
        self._describe_again(namespace)
        keys = [page.key for page in pages]
        self._submit(Operation("store", keys, op, namespace, pages, source))

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Count these records as used. Written down once an interval.

        So are the descriptions of the namespaces in use: nothing else ever reads them, and they
        would be the first to be evicted.
        """
        self._conductor.touch([*keys, *self._described])

    def delete(self, keys: Sequence[PageKey]) -> None:
        """Remove records. Stores of the same pages that were asked for before go first."""
        self._submit(Operation("delete", keys))

    def cancel(self, op: OpId) -> None:
        """Do not begin what has not begun. The operation still ends with its event."""
        self._ledger.cancel(op)

    def describe(self, namespace: Namespace) -> None:
        """Put down what a namespace is, under its digest, and what it may have of the store.

        Where that fails it is tried again with the next store of the namespace.
        """
        digest = namespace.digest
        record = encode_namespace(digest, namespace.descriptor, time.time_ns() // 1000)
        self._described.pop(PageKey(digest), None)
        self._described[PageKey(digest)] = None
        self._forget_oldest(self._described)
        quotas = self._conductor.quotas
        self._conductor.when_alive(quotas.shares.describe, digest, namespace.salt)
        self._describe(digest, record)
        if namespace.salt is not None and quotas.is_limited and not self._has_scanned:
            self.scan(digest)  # else what the store has of it would count for nothing

    def scan(self, namespace: NamespaceDigest) -> None:
        """Look for the pages of a namespace, in the background.

        Every longest chain becomes a ``ChainFound``, a few with each ``drain``.
        """
        self._has_scanned = True
        self._conductor.scan(namespace)

    # ------------------------------------------------------------ events

    def drain(self) -> list[Event]:
        """Return what has happened since the last time. Never blocks."""
        self._watch()
        events = self._ledger.drain()
        if self._conductor.found:
            self._take_chains(events)
        return events

    def pump(self) -> None:
        """Let the loop look at the clock and the queues now. Only who holds the clock needs this.

        A loop whose clock is a test's cannot know that it was moved.
        """
        self._conductor.pump()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until the stores and deletes asked for so far are over; whether they are.

        Their events still have to be drained.
        """
        return self._ledger.wait_for_writes(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish stores, close the backend, end the thread; whether all that was done.

        False after ``timeout_s`` and at most a second more. Then a call of the backend hangs, and
        what it holds of the pool must not be freed while the process lives. Events can be drained
        afterwards: every operation has ended.
        """
        end = time.monotonic() + timeout_s
        self._ledger.refuse(("probe", "fetch"), "closed")
        self._conductor.write_touches()
        self._conductor.pump()
        if not self._ledger.wait_for_writes(timeout_s):
            log.warning("closing: stores took longer than %g s, the rest is dropped", timeout_s)
        self._ledger.refuse(KINDS, "closed")
        if self._conductor.stop(max(end - time.monotonic(), _CLOSE_S)):
            return True
        calls = self._ledger.calls()
        for call in calls:
            self._ledger.give_up(call)
        log.error(
            "closing: %s hangs; abandoned %d of its calls with %d pages of host memory, and the "
            "thread hicache-storage",
            self._name, len(calls), sum(call.num_lent for call in calls),
        )  # fmt: skip
        return False

    # ------------------------------------------------------------ inspection

    def stats(self) -> StoreStats:
        """Return a snapshot of what has been done."""
        conductor, counts = self._conductor, self._conductor.caller.counts
        return StoreStats(
            num_fetched_pages=counts["fetched_pages"],
            num_absent_pages=counts["absent_pages"],
            num_corrupt_pages=counts["corrupt_pages"],
            num_foreign_pages=conductor.num_foreign_pages,
            num_stored_pages=counts["stored_pages"],
            num_present_pages=counts["present_pages"],
            num_deleted_pages=counts["deleted_pages"],
            read_nbytes=counts["read_nbytes"],
            written_nbytes=counts["written_nbytes"],
            day_written_nbytes=conductor.quotas.last_day_nbytes(),
            num_share_evicted_pages=conductor.quotas.num_evicted,
            tenant_nbytes=conductor.quotas.tenant_nbytes,
            dropped={"_".join(key): count for key, count in self._ledger.num_dropped.items()},
            missed=self._ledger.num_missed,
            errors={"_".join(key): count for key, count in conductor.num_errors.copy().items()},
            num_retries=counts["retries"],
            call_seconds={kind: each.copy() for kind, each in conductor.call_seconds.items()},
            num_queued=self._ledger.num_queued,
            num_lent_pages=self._ledger.num_lent,
            num_overdue_pages=self._ledger.num_overdue,
            is_up=conductor.is_up,
            is_full=conductor.is_full,
            num_breaks=conductor.num_breaks,
            backend=conductor.backend_stats,
        )

    def check(self) -> None:
        """Assert that operations, calls and lent pages agree, and the books of the quotas."""
        self._ledger.check()
        self._conductor.quotas.check()

    # ------------------------------------------------------------ helpers

    def _check_slots(self, pages: Sequence[PageRef], slots: "array[int]") -> None:
        assert len(pages) == len(slots)
        assert not slots or min(slots) >= 0
        assert not slots or max(slots) < self._num_pages

    def _submit(self, operation: Operation) -> None:
        if self._ledger.submit(operation):
            self._conductor.pump()

    def _describe(self, digest: NamespaceDigest, record: Sequence[bytes]) -> None:
        operation = Operation("describe", [PageKey(digest)], record=record)
        self._descriptors[digest] = operation
        self._forget_oldest(self._descriptors)
        self._submit(operation)

    @staticmethod
    def _forget_oldest(remembered: dict[_Key, _Value]) -> None:
        if len(remembered) > _MAX_DESCRIPTORS:
            del remembered[next(iter(remembered))]

    def _describe_again(self, digest: NamespaceDigest) -> None:
        """Try a descriptor again that failed; forget the one that is there."""
        last = self._descriptors.get(digest)
        if last is not None and last.is_finished:
            del self._descriptors[digest]
            if last.outcomes != [True]:
                self._describe(digest, last.record)

    def _watch(self) -> None:
        """Keep deadlines where the loop does not, since a backend blocks it."""
        now = self._clock()
        self._conductor.expire(now)
        if not self._conductor.is_blocked(now - self._deadline_s):
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        is_late = self._late_since is not None and now - self._late_since >= _STALL_S
        if not self._is_stalled and (is_late or self._ledger.is_neglected(now - _STALL_S)):
            self._is_stalled = True
            log.warning("storage: %s blocks its loop: until it goes on, all is missed", self._name)
            self._ledger.refuse(AWAITED, "stalled")
            self._conductor.when_alive(self._go_on)

    def _go_on(self) -> None:
        """Take in again what is awaited; called in the loop, which is not blocked any more."""
        self._ledger.accept(AWAITED, "stalled")
        self._is_stalled = False

    def _take_chains(self, events: list[Event]) -> None:
        found, num_pages = self._conductor.found, 0
        while found and num_pages < _CHAIN_PAGES:
            chain = next(found[0], None)
            if chain is None:
                found.popleft()
            else:
                events.append(chain)
                num_pages += len(chain.keys)
        if found:
            self.wake.set()
