"""One step of the engine: who runs, one forward, what comes of it.

::

    poll -> revoked, preempted -> schedule (extend, acquire) -> forward, begin to sample
         -> meanwhile: arrivals, the texts of the step before
         -> wait for the tokens -> drop what is not intact -> commit -> outputs -> release

All on the step thread. Nothing here waits but for the layers that a forward is about to read, and
once a step for its tokens; on a GPU the forward computes until then, and so what comes between
costs no time.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch

from hicache.actions import Refuse, Wait
from hicache.cache import Lease, Polled
from hicache.engine.caching import Cache, TimedCache
from hicache.engine.choosing import Choice, begin_choosing
from hicache.engine.counters import Counters
from hicache.engine.easing import Easing
from hicache.engine.outputs import FinishReason, Output
from hicache.engine.recovery import one_line, release_memory
from hicache.engine.requests import Request
from hicache.engine.scheduler import MAX_OVERTAKEN, Scheduler
from hicache.engine.telling import Teller
from hicache.engine.work import Runner, Work, batch_of
from hicache.events import RequestId
from hicache.keys import NamespaceDigest

MAX_FULL = 4
"""Requests that are told in one step that L1 is full, before the rest are not asked."""

STALLS_BEFORE_PREEMPTING = 3
"""Steps in a row in which nobody could go on."""

LONELY_S = 5.0
"""How long the only running request may wait for a page of an L1 that could hold it."""

logger = logging.getLogger("hicache.engine")


class Stepper:
    """All requests in the engine, and the step that moves them on. Step thread only."""

    def __init__(
        self,
        cache: Cache,
        runner: Runner,
        scheduler: Scheduler,
        namespace: Callable[[str | None], NamespaceDigest],
        clock: Callable[[], float] = time.monotonic,
        is_late: bool | None = None,
    ) -> None:
        """``namespace`` gives the digest of a salt's namespace, opened.

        ``is_late``: whether texts are made and told while the next step computes, which pays
        where that goes on by itself. Default: on a GPU.
        """
        self.cache = TimedCache(cache)
        self.scheduler = scheduler
        self.counters = Counters()
        self._runner = runner
        self._namespace = namespace
        self._clock = clock
        self._measured = cache.measured
        self._matched = lambda request: self.cache.match(request.namespace, request.packed).total
        self._page_size = cache.page_size
        self._num_pages = len(cache.device_pages)
        self._ids = count(1)
        self._requests: dict[RequestId, Request] = {}
        self._touched: list[Request] = []
        is_late = cache.device_pages.is_cuda if is_late is None else is_late
        self._teller = Teller(self._requests, self._finish, self.counters, clock, is_late=is_late)
        self._easing = Easing(scheduler.chunk_tokens)
        self.meanwhile: Callable[[], None] = lambda: None
        """Called in every step while the forward computes; may add requests, not end them."""
        self._num_stalls = 0
        self._stalled_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether there is no request at all."""
        return not self._requests

    @property
    def requests(self) -> Sequence[Request]:
        """All requests, waiting or running."""
        return tuple(self._requests.values())

    # ------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queue a request; what it can reuse is fetched ahead of its turn."""
        self._touched = [request]
        request.id = RequestId(next(self._ids))
        self._requests[request.id] = request
        request.namespace = self._namespace(request.salt)
        request.packed = bytes(request.tokens)
        self.scheduler.add(request)
        self.cache.prefetch(
            request.id,
            request.namespace,
            request.packed,
            # The last token is always computed: its logits are needed.
            max_hit_tokens=request.num_tokens - 1,
            priority=request.priority,
            continues=request.first_id,
        )

    def abort(self, request: Request) -> None:
        """End a request now. Harmless for one that is over."""
        if request.id in self._requests:
            self._finish(request, request.answer.end("abort"))

    def end_unbegun(self, request: Request, error: str | None = None) -> None:
        """End a request that was never added: it was aborted, or the engine cannot go on."""
        reason: FinishReason = "abort" if error is None else "error"
        self.counters.finished[reason] += 1
        request.generation.put(request.answer.end(reason, error), self._clock())

    def fail(self, error: BaseException) -> None:
        """End the requests of the step that raised, and everybody where it cannot be told whose.

        Harmless for the rest, which go on in the next step.
        """
        for request in self._touched or self.requests:
            request.has_failed = True
        self.try_again(error)

    def try_again(self, error: BaseException) -> None:
        """Let the requests of the step that raised be computed again, once and no more."""
        self.counters.num_failed_steps += 1
        text = f"the step that computed this request failed: {one_line(error)}"
        for request in self._touched or self.requests:
            if request.id in self._requests and request.has_failed:
                self._end_anyhow(request, "error", text)
            request.has_failed = True

    def end_all(self, reason: FinishReason = "abort", text: str | None = None) -> None:
        """End every request."""
        for request in self.requests:
            self._end_anyhow(request, reason, text)

    # ------------------------------------------------------------ the step

    def step(self) -> bool:
        """Move on whoever can; False where nobody could."""
        started, started_cpu = time.perf_counter(), time.thread_time()
        self.scheduler.step += 1
        self._touched = []
        self._heed(self.cache.poll())
        work = list(self._schedule())
        self._touched = [item.request for item in work]
        if not work:
            self._teller.tell()
            self._unstick()
            return False
        self._num_stalls = 0
        if not self._compute(work):
            return True
        self._easing.went_well()
        self.counters.num_steps += 1
        self.counters.step_seconds += time.perf_counter() - started
        self.counters.step_cpu_seconds += time.thread_time() - started_cpu
        return True

    def _heed(self, polled: Polled) -> None:
        """Take back what the cache has revoked and wants back."""
        for lease in polled.revoked:
            if (request := self._requests.get(lease.request)) is not None:
                self.counters.num_revoked += 1
                request.num_computed = lease.num_valid_tokens
                request.lose_hits(lease.num_valid_tokens)
        for lease in polled.preempted:
            if (request := self._requests.get(lease.request)) is not None:
                self._preempt(request)

    def _schedule(self) -> Iterator[Work]:
        """Yield the work of this step; every item has the slots that it needs."""
        budget = min(self.scheduler.chunk_tokens, self._easing.limit)
        alone = self.scheduler.fixed_chunks
        is_blocked = False
        if alone and (work := next(self._admit(budget), None)) is not None:
            yield work
            return
        for request in self.scheduler.running_order():
            num_tokens = self.scheduler.chunk(request, budget)
            if num_tokens == 0:
                return
            work = self._work(request, request.num_computed + num_tokens)
            if work is None:
                is_blocked = True
                continue
            yield work
            if alone:
                return
            budget -= num_tokens
        # Whoever is blocked gets the next free pages, before anybody new.
        if not is_blocked and not alone:
            yield from self._admit(budget)

    def _admit(self, budget: int) -> Iterator[Work]:
        """Yield the first work of waiting requests that the cache lets run."""
        num_full = 0
        candidates = self.scheduler.waiting_order(self._matched) if self._can_admit(budget) else []
        for request in candidates:
            if not self._can_admit(budget) or num_full >= MAX_FULL:
                return
            if self.scheduler.should_defer(request):
                continue
            self._touched = [request]
            answer = self.cache.acquire(request.id, budget)
            if isinstance(answer, Refuse):
                self._end_with_error(request, answer.reason)
            elif isinstance(answer, Wait):
                is_full = answer.reason != "storage"
                num_full += is_full
                if is_full and request.num_overtaken >= MAX_OVERTAKEN:
                    return
            else:
                self._begin(request, answer)
                num_tokens = self.scheduler.chunk(request, budget)
                work = self._work(request, request.num_computed + num_tokens)
                if work is not None:
                    yield work
                    budget -= num_tokens

    def _compute(self, work: Sequence[Work]) -> bool:
        """Run one forward, and do with it what its leases allow; False where it did not fit."""
        started = self._clock()
        ends = [row for row, item in enumerate(work) if item.end == item.request.num_tokens]
        choice = self._launch(work, ends)
        if choice is None:
            self._make_do(work)
            return False
        self._teller.tell()
        self.meanwhile()
        self._touched = [item.request for item in work]
        token_ids = dict(zip(ends, choice.wait(), strict=True))
        self._measure(work, self._clock() - started)
        self._settle(work, token_ids)
        return True

    def _launch(self, work: Sequence[Work], ends: Sequence[int]) -> Choice | None:
        """Begin a forward, and to choose tokens; ``None`` where the device has no memory for it."""
        try:
            logits = self._runner.forward(batch_of(work))
            return begin_choosing(logits, ends, [work[row].request.sampler for row in ends])
        except torch.OutOfMemoryError as error:
            num_tokens = sum(item.num_tokens for item in work)
            logger.warning("no memory for a step of %d tokens: %s", num_tokens, one_line(error))
            return None

    def _make_do(self, work: Sequence[Work]) -> None:
        """Have the next steps be smaller; end a request that does not fit on its own."""
        self.counters.num_out_of_memory += 1
        release_memory()
        is_smaller = self._easing.eased(sum(item.num_tokens for item in work))
        if self.scheduler.fixed_chunks:  # of one shape, whatever happens
            [item] = work
            is_smaller = not item.request.has_failed
            item.request.has_failed = True
        if is_smaller:
            return
        self._end_with_error(
            work[0].request,
            f"the device has no memory to compute this request ({work[0].end} tokens): lower "
            f"cache.device.size or engine.chunk_tokens",
        )

    def _settle(self, work: Sequence[Work], token_ids: dict[int, int]) -> None:
        """Take in what a forward has computed, and the tokens that it ended in, by row."""
        # What a failed load has spoilt is dropped; the next poll says how much is valid. So is
        # what was computed for a request that has ended meanwhile.
        kept = [
            (row, item) for row, item in enumerate(work) if item.is_wanted and item.lease.is_intact
        ]
        for _, item in kept:
            self._computed(item)
        for _, item in kept:
            if tokens := item.request.uncommitted(self._page_size):
                self.cache.commit(item.lease, tokens)
        for row, item in kept:
            if row in token_ids:
                item.request.sampler.use()
                self._teller.say(item.request, token_ids[row])

    # ------------------------------------------------------------ parts of a step

    def _can_admit(self, budget: int) -> bool:
        return budget > 0 and self.scheduler.has_room

    def _begin(self, request: Request, lease: Lease) -> None:
        assert lease.hit.total < request.num_tokens
        request.lease = lease
        request.num_computed = lease.hit.total
        request.packed = b""
        if not request.has_hit:
            request.hit = lease.hit
        self.scheduler.admit(request)

    def _work(self, request: Request, end: int) -> Work | None:
        """Return the work of computing a request up to ``end``; None where it has no slots."""
        lease = request.lease
        assert lease is not None
        num_pages = -(-end // self._page_size)
        if num_pages > self._num_pages:
            logger.warning(
                "a text ends early: %d tokens need %d pages of %d tokens, L1 has %d: "
                "raise cache.device.size",
                end, num_pages, self._page_size, self._num_pages,
            )  # fmt: skip
            self._finish(request, request.answer.end("length"))
            return None
        if num_pages > len(lease.slots):
            self._touched = [request]
            if not self.cache.extend(lease, num_pages):
                return None
        assert num_pages <= len(lease.slots)
        return Work(request, lease, request.num_computed, end)

    def _computed(self, item: Work) -> None:
        request = item.request
        if not request.is_decoding:
            self.counters.num_computed_tokens += item.end - item.start
        request.num_computed = item.end
        request.ran_at = self.scheduler.step
        if not request.has_hit:
            request.has_hit = True
            request.generation.hit = request.hit
            self.counters.count_hit(request.hit, request.num_prompt_tokens)

    def _measure(self, work: Sequence[Work], seconds: float) -> None:
        """Tell the cache how fast prompts are computed, by steps that do little else."""
        num_tokens = sum(item.end - item.start for item in work)
        if num_tokens >= 4 * len(work) and num_tokens >= 16:
            self._measured(num_tokens, seconds)

    def _finish(self, request: Request, output: Output) -> None:
        """Give back all that a request has, and hand over its last output."""
        assert output.finish_reason is not None
        self.cache.release(request.id)
        del self._requests[request.id]
        self.scheduler.remove(request)
        request.lease = None
        self.counters.finished[output.finish_reason] += 1
        request.generation.put(output, self._clock())

    def _end_with_error(self, request: Request, text: str) -> None:
        self._finish(request, request.answer.end("error", text))

    def _end_anyhow(self, request: Request, reason: FinishReason, text: str | None = None) -> None:
        """End a request even if the cache, or the request's own state, is broken."""
        try:
            self._finish(request, request.answer.end(reason, text))
        except Exception:
            logger.exception("a request could not be ended in order")
            self._requests.pop(request.id, None)
            self.scheduler.remove(request)
            if not request.generation.is_ended:
                output = Output("", (), finish_reason=reason, error=text)
                request.generation.put(output, self._clock())

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages; it waits again, with its output so far."""
        self.counters.num_preemptions += 1
        request.first_id = request.first_id or request.id
        self.cache.release(request.id)
        del self._requests[request.id]
        self.scheduler.remove(request)
        request.lease = None
        request.num_computed = 0
        request.matched_at = -1
        self.add(request)

    def _unstick(self) -> None:
        """Make room where requests run and none of them can go on."""
        running = self.scheduler.running
        if not running:
            return
        if self._num_stalls == 0:
            self._stalled_at = self._clock()
        self._num_stalls += 1
        victim = self.scheduler.victim()
        assert victim is not None
        if len(running) > 1 and self._num_stalls >= STALLS_BEFORE_PREEMPTING:
            self._num_stalls = 0
            self._preempt(victim)
        elif len(running) == 1 and self._clock() - self._stalled_at > LONELY_S:
            self._end_with_error(victim, "L1 has no room for the next page of this request")
