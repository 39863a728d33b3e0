"""The engine of a replay: requests wait, run, prefill in turns, decode and end, in virtual time.

As the server's does, it lets a request run when it is its turn to compute, not before: what
storage has of it can arrive meanwhile. It asks for the requests in the order in which they came;
one that waits for storage lets others pass, one that finds no room in L1 does not.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from hicache.actions import Action, CopyPage, Grant, Grown, Load, Refuse, Store, Wait
from hicache.events import Arrived, Computed, Extended, OpId, Released, RequestId, Wanted
from hicache.keys import TOKEN_NBYTES, NamespaceDigest
from hicache.tools.replay.settings import Settings
from hicache.tools.replay.tally import Tally
from hicache.tools.replay.workload import Job
from hicache.tools.replay.world import World

WINDOW = 64
"""Waiting requests that are asked for at a time, as the server's scheduler does."""


@dataclass(slots=True)
class _Running:
    """A request that has its lease."""

    job: Job
    num_hit_pages: int
    num_hit_tokens: int
    loads: set[OpId]
    granted_s: float
    has_room_for_output: bool = False


@dataclass(order=True, slots=True)
class _Due:
    """A moment at which a running request has something done."""

    time_s: float
    number: int
    is_end: bool = field(compare=False)
    """The end of its decode; else that of its prefill."""
    running: _Running = field(compare=False)


class Engine:
    """Replays jobs on a world. ``run`` it once."""

    def __init__(self, settings: Settings, world: World, tally: Tally) -> None:
        self._world = world
        self._tally = tally
        self._is_sequential = settings.is_sequential
        self._concurrency = 1 if settings.is_sequential else settings.concurrency
        self._prefill_tokens_per_s = settings.prefill_tokens_per_s
        self._decode_tokens_per_s = (
            math.inf if settings.is_sequential else settings.decode_tokens_per_s
        )
        self._waiting: deque[Job] = deque()
        self._running: dict[int, _Running] = {}
        self._loading: dict[OpId, list[_Running]] = {}
        self._due: list[_Due] = []
        self._num_due = 0
        self._num_prefilling = 0
        self._layer_groups = settings.layer_groups
        self._held_back: dict[int, list[Job]] = {}
        """Jobs that continue one which has not ended, by its index."""
        self._has_ended: set[int] = set()
        self._lost_outputs: set[tuple[NamespaceDigest, bytes]] = set()
        """The first page of each output that was not kept."""
        self._is_stale = False
        """Whether a waiting request may get another answer now than it got last."""
        self._page_nbytes = tally.page_grains * TOKEN_NBYTES
        self._page_tokens = tally.page_grains * tally.grain_tokens

    def run(self, jobs: list[Job]) -> None:
        """Let all jobs arrive and end. O(events log events)."""
        world = self._world
        for job in jobs:
            self._run_until(job.time_s)
            world.now = max(world.now, job.time_s)
            if job.after is not None and job.after not in self._has_ended:
                self._held_back.setdefault(job.after, []).append(job)
                continue
            self._arrive(job)
            if self._is_sequential:
                self._run_until(math.inf)
        self._run_until(math.inf)
        assert not self._waiting
        assert not self._running
        assert not self._held_back

    def _run_until(self, time_s: float) -> None:
        """Let happen what happens before ``time_s``; nothing is left to do if that is infinite."""
        world = self._world
        while True:
            if self._is_stale:
                self._schedule()
            due = self._due[0].time_s if self._due else math.inf
            event_time = world.next_time()
            if min(due, event_time) >= time_s:
                return
            if due <= event_time:
                world.now = max(world.now, due)
                self._take(heapq.heappop(self._due))
            else:
                self._notice(world.advance())

    def _notice(self, ended: Action | None) -> None:
        """Go on with what the end of an operation, or a deadline, makes possible."""
        if not (self._running and isinstance(ended, Load | Store)):  # these give nobody room
            self._is_stale = bool(self._waiting)
        if isinstance(ended, Load | CopyPage):
            for running in self._loading.pop(ended.op, ()):
                running.loads.discard(ended.op)
                if not running.loads:
                    self._prefill(running)

    # ------------------------------------------------------------ the life of a request

    def _arrive(self, job: Job) -> None:
        self._waiting.append(job)
        self._tally.outcomes[job.index].arrived_s = self._world.now
        num_grains = len(job.tokens) // TOKEN_NBYTES
        kept = job.num_kept_pages * self._page_nbytes // TOKEN_NBYTES
        # A page that has others behind it may be hit in part.
        limit = kept if self._page_nbytes == TOKEN_NBYTES else num_grains
        self._world.send(
            Arrived(RequestId(job.index), job.namespace, job.tokens, max_hit_tokens=limit)
        )
        self._is_stale = True

    def _schedule(self) -> None:
        """Let as many waiting requests run as may."""
        self._is_stale = False
        world, passed_over = self._world, list[Job]()
        is_waiting = world.planner.is_waiting
        while self._waiting and self._can_admit() and len(passed_over) < WINDOW:
            job = self._waiting[0]
            if is_waiting(RequestId(job.index), world.now):
                passed_over.append(self._waiting.popleft())
                continue
            num_grains = len(job.tokens) // TOKEN_NBYTES
            answer = world.send(Wanted(RequestId(job.index), num_grains))
            if isinstance(answer, Wait) and answer.reason != "storage":
                break
            self._waiting.popleft()
            if isinstance(answer, Wait):
                passed_over.append(job)
            elif isinstance(answer, Grant):
                self._start(job, answer)
            else:
                assert isinstance(answer, Refuse)
                self._tally.refused(job.index, job.num_pages)
                self._end(job)
        self._waiting.extendleft(reversed(passed_over))

    def _can_admit(self) -> bool:
        """Whether there is a place, and nobody else's prompt is being computed."""
        is_busy = self._num_prefilling > 0 and math.isfinite(self._prefill_tokens_per_s)
        return len(self._running) < self._concurrency and not is_busy

    def _start(self, job: Job, grant: Grant) -> None:
        tally, now = self._tally, self._world.now
        tally.granted(job.index, grant.hit, now)
        outcome, size = tally.outcomes[job.index], self._page_nbytes
        first_missed = job.tokens[outcome.num_hit * size : (outcome.num_hit + 1) * size]
        if (job.namespace, first_missed) in self._lost_outputs:
            tally.output_not_kept(job.index)
        tally.unfinished(job.index, job.num_pages - job.num_kept_pages)
        num_hit_tokens = outcome.num_hit * self._page_tokens + outcome.partial
        running = _Running(job, outcome.num_hit, num_hit_tokens, set(grant.loads), now)
        self._num_prefilling += 1
        self._running[job.index] = running
        for op in grant.loads:
            self._loading.setdefault(op, []).append(running)
        if not running.loads:
            self._prefill(running)

    def _prefill(self, running: _Running) -> None:
        """Compute what is not hit; what is loaded has arrived, one group of layers at a time.

        The first layers began when their group was there, the last ones begin now.
        """
        job, now, groups = running.job, self._world.now, self._layer_groups
        num_tokens = max(1, job.num_input_tokens - running.num_hit_tokens)  # a logit is needed
        compute_s = num_tokens / self._prefill_tokens_per_s
        first_s = running.granted_s + (now - running.granted_s) / groups
        end = max(first_s + compute_s, now + compute_s / groups)
        outcome = self._tally.outcomes[job.index]
        outcome.ttft_s = end - outcome.arrived_s
        self._plan(end, False, running)

    def _take(self, due: _Due) -> None:
        running, world = due.running, self._world
        job = running.job
        if due.is_end:
            self._keep_output(running)
            del self._running[job.index]
            self._end(job)
            return
        self._num_prefilling -= 1
        self._is_stale = bool(self._waiting)
        size = self._page_nbytes
        rest = job.tokens[running.num_hit_pages * size : job.num_kept_pages * size]
        if rest:
            world.send(Computed(RequestId(job.index), rest))
        self._make_room_for_output(running)
        self._plan(world.now + job.num_output_tokens / self._decode_tokens_per_s, True, running)

    def _make_room_for_output(self, running: _Running) -> None:
        job = running.job
        if job.output and not running.has_room_for_output:
            num_pages = job.num_kept_pages + len(job.output) // self._page_nbytes
            answer = self._world.send(Extended(RequestId(job.index), num_pages))
            running.has_room_for_output = isinstance(answer, Grown)

    def _keep_output(self, running: _Running) -> None:
        """Commit what was generated, if L1 had room for it at the start or has it at the end."""
        job = running.job
        self._make_room_for_output(running)
        if running.has_room_for_output:
            self._world.send(Computed(RequestId(job.index), job.output))
        elif job.output:
            self._lost_outputs.add((job.namespace, job.output[: self._page_nbytes]))
            self._tally.num_lost_output_pages += len(job.output) // self._page_nbytes

    def _end(self, job: Job) -> None:
        self._world.send(Released(RequestId(job.index)))
        self._is_stale = bool(self._waiting)
        self._has_ended.add(job.index)
        for held_back in self._held_back.pop(job.index, ()):
            self._arrive(held_back)

    def _plan(self, time_s: float, is_end: bool, running: _Running) -> None:
        self._num_due += 1
        heapq.heappush(self._due, _Due(time_s, self._num_due, is_end, running))
