"""One step of the engine: who runs, one forward, what comes of it.

::

    poll -> revoked, preempted -> schedule (extend, acquire) -> forward
         -> drop what is not intact -> sample -> commit -> outputs -> release

All on the step thread. Nothing here waits but for the layers that a forward is about to read.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from hicache.actions import HitTokens, Refuse, Wait
from hicache.cache import Lease, Polled
from hicache.engine.caching import Cache, TimedCache
from hicache.engine.counters import Counters
from hicache.engine.outputs import FinishReason, Output
from hicache.engine.requests import Request
from hicache.engine.runner import Batch, SequenceSlice
from hicache.engine.sampling import sample
from hicache.engine.scheduler import MAX_OVERTAKEN, Scheduler
from hicache.events import RequestId
from hicache.keys import NamespaceDigest

MAX_FULL = 4
"""Requests that are told in one step that L1 is full, before the rest are not asked."""

STALLS_BEFORE_PREEMPTING = 3
"""Steps in a row in which nobody could go on."""

LONELY_S = 5.0
"""How long the only running request may wait for a page of an L1 that could hold it."""

logger = logging.getLogger("hicache.engine")


class Runner(Protocol):
    """Computes the next tokens of several sequences."""

    def forward(self, batch: Batch) -> Tensor:
        """Return logits of each sequence's last token, ``[sequences, vocabulary]``."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes of one request: its tokens from ``start`` up to ``end``."""

    request: Request
    lease: Lease
    start: int
    end: int


class Stepper:
    """All requests in the engine, and the step that moves them on. Step thread only."""

    def __init__(
        self,
        cache: Cache,
        runner: Runner,
        scheduler: Scheduler,
        namespace: Callable[[str | None], NamespaceDigest],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``namespace`` gives the digest of a salt's namespace, opened."""
        self.cache = TimedCache(cache)
        self.scheduler = scheduler
        self.counters = Counters()
        self._runner = runner
        self._namespace = namespace
        self._clock = clock
        self._measured = cache.measured
        self._page_size = cache.page_size
        self._num_pages = len(cache.device_pages)
        self._ids = count(1)
        self._requests: dict[RequestId, Request] = {}
        self._touched: list[Request] = []
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

    def end_unbegun(self, request: Request) -> None:
        """Abort a request that was never added."""
        self.counters.finished["abort"] += 1
        request.generation.put(request.answer.end("abort"), self._clock())

    def fail(self, error: BaseException) -> None:
        """End the requests of the step that raised, and everybody where it cannot be told whose.

        Harmless for the rest, which go on in the next step.
        """
        self.counters.num_failed_steps += 1
        text = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        text = f"the step that computed this request failed: {text}"
        for request in self._touched or self.requests:
            if request.id in self._requests:
                self._end_anyhow(request, "error", text)

    def end_all(self) -> None:
        """Abort every request."""
        for request in self.requests:
            self._end_anyhow(request, "abort")

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
            self._unstick()
            return False
        self._num_stalls = 0
        self._compute(work)
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
                request.hit = _at_most(request.hit, lease.num_valid_tokens)
        for lease in polled.preempted:
            if (request := self._requests.get(lease.request)) is not None:
                self._preempt(request)

    def _schedule(self) -> Iterator[Work]:
        """Yield the work of this step; every item has the slots that it needs."""
        budget = self.scheduler.chunk_tokens
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
        candidates = self.scheduler.waiting_order(self._match) if self._can_admit(budget) else []
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

    def _compute(self, work: Sequence[Work]) -> None:
        """Run one forward, and do with it whatever its leases allow."""
        started = self._clock()
        logits = self._runner.forward(_batch(work))
        if logits.is_cuda:
            torch.cuda.current_stream().synchronize()
        # What a failed load has spoilt is dropped; the next poll says how much is valid.
        kept = [(row, item) for row, item in enumerate(work) if item.lease.is_intact]
        for _, item in kept:
            self._computed(item)
        rows = [row for row, item in kept if item.end == item.request.num_tokens]
        chosen = [work[row].request for row in rows]
        token_ids = _sample(logits, rows, chosen)
        self._measure(work, self._clock() - started)
        for _, item in kept:
            self._commit(item)
        for request, token_id in zip(chosen, token_ids, strict=True):
            self._say(request, token_id)

    # ------------------------------------------------------------ parts of a step

    def _can_admit(self, budget: int) -> bool:
        return budget > 0 and self.scheduler.has_room

    def _match(self, request: Request) -> int:
        return self.cache.match(request.namespace, request.packed).total

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

    def _commit(self, item: Work) -> None:
        tokens = item.request.uncommitted(self._page_size)
        if tokens:
            self.cache.commit(item.lease, tokens)

    def _say(self, request: Request, token_id: int) -> None:
        """Add a token to a request, tell its reader, and end it where the token does."""
        if token_id < 0:
            self._end_with_error(request, "the model computed no numbers for its next token")
            return
        request.append(token_id)
        output = request.answer.push(token_id)
        self.counters.num_output_tokens += 1
        is_first = request.generation.timing.first_token is None
        if output.finish_reason is None:
            request.generation.put(output, self._clock())
        else:
            self._finish(request, output)
        if is_first:
            self.counters.count_first_token(request.generation.hit, request.generation.timing)

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


def _batch(work: Sequence[Work]) -> Batch:
    leases = [item.lease for item in work]

    def wait(layer: int) -> None:
        for lease in leases:
            lease.wait(layer)

    slices: list[SequenceSlice] = []
    for item in work:
        token_ids = item.request.token_ids(item.start, item.end)
        slices.append(SequenceSlice(token_ids, item.start, item.lease.slots))
    return Batch(slices, wait)


def _sample(logits: Tensor, rows: Sequence[int], requests: Sequence[Request]) -> list[int]:
    if not requests:
        return []
    if len(rows) < len(logits):
        logits = logits[list(rows)]
    return sample(logits, [request.sampler for request in requests])


def _at_most(hit: HitTokens, num_tokens: int) -> HitTokens:
    """Return a hit of at most so many tokens, without those of the slowest tiers first."""
    device = min(hit.device, num_tokens)
    host = min(hit.host, num_tokens - device)
    return HitTokens(device, host, min(hit.storage, num_tokens - device - host))
