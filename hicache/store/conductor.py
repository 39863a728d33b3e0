"""Makes the calls: when, how many at once, for how long, and what follows from how they end.

Belongs to the storage loop, except for ``start`` and ``expire``, which any thread may call.
"""

import asyncio
import errno
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVarTuple

from hicache.codec import PageCodec
from hicache.config import StorageConfig
from hicache.errors import HiCacheError, StorageFull
from hicache.events import ChainFound, StorageDown, StorageUp
from hicache.histogram import STORAGE_BUCKETS_S, Histogram
from hicache.keys import NamespaceDigest, PageKey
from hicache.storage import StorageBackend, StorageStats
from hicache.store.breaker import Breaker
from hicache.store.calls import Caller
from hicache.store.ledger import Ledger
from hicache.store.loop import LoopThread
from hicache.store.operations import AWAITED, KINDS, MISSED, Call, Kind, Operation
from hicache.store.quotas import Quotas
from hicache.store.restart import Chains

log = logging.getLogger(__name__)

_Args = TypeVarTuple("_Args")

_MAX_TRIALS = 8
"""Trial calls that may hang at once: each may hold a thread of the backend for ever."""
_MAX_TOUCHED = 1 << 17
"""Uses noted between two times of writing them down."""
_SCAN_SLICE = 64
"""Headers that a scan reads between two looks at the rest of the loop."""


class Conductor:
    """Runs the calls that the ledger hands out against one backend."""

    def __init__(
        self,
        backend: StorageBackend,
        codec: PageCodec,
        memory: memoryview,
        ledger: Ledger,
        config: StorageConfig,
        *,
        clock: Callable[[], float],
        wake: threading.Event,
    ) -> None:
        self.quotas = Quotas(
            config, page_size=codec.page_size, page_nbytes=codec.page_nbytes, clock=clock
        )
        self.caller = Caller(backend, codec, memory, self.quotas, config.concurrency)
        self.opened: Future[None] = Future()
        """Done when the backend is open, or with the reason why not."""
        self.found: deque[Iterator[ChainFound]] = deque()
        """What finished scans have found."""
        self.num_errors: Counter[tuple[str, str]] = Counter()
        self.call_seconds: dict[Kind, Histogram] = {
            kind: Histogram(STORAGE_BUCKETS_S) for kind in KINDS
        }
        self.num_breaks = 0
        self.num_foreign_pages = 0
        self.is_full = False
        self.backend_stats: StorageStats | None = None
        self._backend = backend
        self._codec = codec
        self._memory = memory
        self._ledger = ledger
        self._config = config
        self._clock = clock
        self._wake = wake
        self._breaker = Breaker(config.breaker_failures)
        self._thread = LoopThread("hicache-storage", clock, self._on_death)
        self._touched: dict[PageKey, None] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._others: set[asyncio.Task[None]] = set()
        self._touch_lock = threading.Lock()
        self._num_trials = 0
        self._is_said_full = False
        self._is_pump_posted = False
        self._pump_posted = 0.0
        self._is_asking = False
        self._is_dead = False
        self._is_running = False
        self._has_scanned = False

    # ------------------------------------------------------------ from any thread

    def start(self) -> None:
        """Open the backend in the loop; ``opened`` tells."""
        self._thread.start(self._main)

    def pump(self) -> None:
        """Make the calls that can be made, soon."""
        if not self._is_pump_posted:
            self._pump_posted = self._clock()
            self._is_pump_posted = True
            self._thread.post(self._pump)

    def is_blocked(self, since: float) -> bool:
        """Whether the loop owes, since then or longer, what it was asked to do soon.

        It waits for nothing but its turn; so something in it does not return: a backend's scan,
        or whatever else of a third party's is not a call of the ledger's.
        """
        return self._is_pump_posted and self._is_running and self._pump_posted <= since

    def expire(self, now: float) -> None:
        """Give up the calls whose deadline has passed.

        The loop does so in time. Where a backend blocks the loop, another thread can.
        """
        if self._ledger.expire(now):
            self.pump()

    def when_alive(self, function: Callable[[*_Args], object], *args: *_Args) -> None:
        """Call ``function`` as soon as the loop is not blocked."""
        self._thread.post(function, *args)

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Note uses, to be written down once an interval. Beyond 131,072 they are forgotten."""
        with self._touch_lock:
            if len(self._touched) + len(keys) <= _MAX_TOUCHED:
                self._touched.update(dict.fromkeys(keys))

    def write_touches(self) -> None:
        """Submit the uses noted so far."""
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        self._ledger.submit(Operation("touch", list(touched)))

    def scan(self, namespace: NamespaceDigest) -> None:
        """Look for chains of this namespace in the background."""
        self._thread.post(self._begin, self._scan, namespace)

    def stop(self, timeout_s: float) -> bool:
        """Close the backend once all calls have returned, and join the thread; whether it ended.

        If not, it still does so later, if ever the calls return.
        """
        self._is_running = False
        self._thread.post(self._stop)
        return self._thread.join(timeout_s)

    # ------------------------------------------------------------ the loop's life

    async def _main(self) -> None:
        self._stopped = asyncio.Event()
        try:
            await self._backend.open([self._memory])
        except BaseException as error:  # noqa: BLE001  whoever called start gets it
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        self._tick()
        self._pump()
        self._is_running = True
        await self._stopped.wait()
        while self._calls:
            await asyncio.wait(self._calls)
        self.caller.close()
        try:
            await self._backend.close()
        except BaseException:
            log.exception("closing the storage backend failed")

    def _stop(self) -> None:
        self._stopped.set()

    def _on_death(self) -> None:
        """End every operation. What calls hold stays lent: their threads may still be at it."""
        self._is_dead = True
        self._is_running = False
        self._ledger.refuse(KINDS, "closed")
        for call in self._ledger.calls():
            self._ledger.give_up(call)
        self.caller.close()

    def _begin(
        self, work: Callable[[*_Args], Coroutine[object, object, None]], *args: *_Args
    ) -> None:
        """Run something beside the calls, for as long as the loop lives."""
        task = asyncio.get_running_loop().create_task(work(*args))
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def _later(self, delay_s: float, function: Callable[[], object]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, function)

    # ------------------------------------------------------------ calls

    def _pump(self) -> None:
        self._is_pump_posted = False
        for expired in self._ledger.take_expired():
            self._failed(expired.kind, TimeoutError("no answer in time"))
        while call := self._ledger.take(self._clock()):
            task = asyncio.get_running_loop().create_task(self._run(call))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _run(self, call: Call) -> None:
        """Make a call, and wait for it however long it takes: its pages are lent until then.

        It is never cancelled. Cancelling ends a coroutine, not the thread that it waits for, and
        that would go on writing.
        """
        timer = self._later(self._config.deadline_s, self._on_deadline)
        outcomes, reason = [False] * call.num_keys, "failed"
        try:
            outcomes = await self.caller.perform(call)
            reason = MISSED if call.kind in ("probe", "fetch") else call.refusal
        except BaseException as error:  # noqa: BLE001  a third party's, and L3 must go on
            if not call.is_given_up:
                self._failed(call.kind, error)
        else:
            if not call.is_given_up:
                self._succeeded(call)
        finally:
            timer.cancel()
            if not self._is_dead:
                self._ledger.finish(call, outcomes, reason)
                self._pump()

    def _on_deadline(self) -> None:
        self.expire(self._clock())

    def _succeeded(self, call: Call) -> None:
        self._breaker.succeeded()
        self.call_seconds[call.kind].add(self._clock() - call.started)
        if call.kind == "store" and self._is_said_full:
            self._is_said_full = False
            log.info("storage has room again")

    def _failed(self, what: str, error: BaseException) -> None:
        """A call has failed, or was given up."""
        if isinstance(error, StorageFull) or (
            isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        ):
            self._suspend_storing(error)
            return
        self._count(what, error)
        if self._breaker.failed():
            self._detach(error)

    def _count(self, what: str, error: BaseException) -> None:
        kind = (what, type(error).__name__)
        self.num_errors[kind] += 1
        if self.num_errors[kind] == 1:
            is_foreseen = isinstance(error, HiCacheError | OSError)  # their text says it all
            log.warning(
                "storage: %s failed: %s: %s (further ones of this kind are only counted)",
                *kind, error, exc_info=None if is_foreseen else error,
            )  # fmt: skip

    # ------------------------------------------------------------ a full store

    def _suspend_storing(self, error: BaseException) -> None:
        if not self._is_said_full:
            self._is_said_full = True
            log.warning("storage has no room, so nothing is stored for now: %s", error)
        if not self.is_full:
            self.is_full = True
            self._ledger.refuse(["store"], "full")
            self._later(self._config.breaker_retry_s, self._resume_storing)

    def _resume_storing(self) -> None:
        self.is_full = False
        self._ledger.accept(["store"], "full")

    # ------------------------------------------------------------ a failing backend

    def _detach(self, error: BaseException) -> None:
        log.warning("storage is detached after failing again and again: %r", error)
        self.num_breaks += 1
        self._ledger.emit(StorageDown())
        self._ledger.pause()
        self._ledger.refuse(AWAITED, "down")
        self._retry = self._later(self._config.breaker_retry_s, self._try_again)

    def _try_again(self) -> None:
        self._retry = self._later(self._config.breaker_retry_s, self._try_again)
        if self._num_trials < _MAX_TRIALS:
            self._begin(self._trial)

    async def _trial(self) -> None:
        self._num_trials += 1
        if await self._is_done("trial", self.caller.trial()) and self._breaker.is_open:
            self._attach()
        self._num_trials -= 1

    def _attach(self) -> None:
        log.info("storage is attached again")
        self._retry.cancel()
        self._breaker.close()
        self._ledger.accept(AWAITED, "down")
        self._ledger.resume()
        self._ledger.emit(StorageUp())
        self._pump()

    @property
    def is_up(self) -> bool:
        """Whether calls are let through."""
        return not self._breaker.is_open

    # ------------------------------------------------------------ now and then

    def _tick(self) -> None:
        self._later(self._config.touch_interval_s, self._tick)
        self.write_touches()
        self._pump()
        if not self._is_asking:
            self._begin(self._ask_stats)

    async def _ask_stats(self) -> None:
        self._is_asking = True
        await self._is_done("stats", self._note_stats())
        self._is_asking = False

    async def _note_stats(self) -> None:
        self.backend_stats = await self._backend.stats()

    async def _scan(self, namespace: NamespaceDigest) -> None:
        """Note the header of every record, then let chains of them be taken.

        Also of those that were noted before a failure.
        """
        chains = Chains(self._codec, namespace)
        await self._is_done("scan", self._note_headers(chains))
        self.found.append(iter(chains))
        self._wake.set()

    async def _note_headers(self, chains: Chains) -> None:
        num_records = num_pages = num_foreign = 0
        is_first, self._has_scanned = not self._has_scanned, True
        async for key, header in self._backend.scan(self._codec.header_nbytes):
            if chains.note(key, header):
                num_pages += 1
            elif self._codec.is_foreign(header):
                num_foreign += 1
            if is_first:
                self.quotas.found(key, header, self._codec)
            num_records += 1
            if not num_records % _SCAN_SLICE:
                await asyncio.sleep(0)
        self.num_foreign_pages = num_foreign
        log.info(
            "storage: %d records, %d pages of this namespace, %d sealed with keys not here",
            num_records, num_pages, num_foreign,
        )  # fmt: skip

    async def _is_done(self, what: str, work: Coroutine[object, object, None]) -> bool:
        """Do something beside the calls; whether it did not fail."""
        try:
            await work
        except BaseException as error:  # noqa: BLE001  a third party's, and L3 must go on
            if not self._stopped.is_set():  # else it may be our own cancelling
                self._count(what, error)
            return False
        return True
