"""The engine of a replay: requests wait, run, prefill in turns, decode and end, in virtual time.

As the server's does, it asks for the requests in the order in which they came; one that waits for
storage lets others pass, one that finds no room in L1 does not.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from hicache.actions import Action, Grant, Load, Refuse, Store, Wait
from hicache.events import Arrived, Computed, OpId, Released, RequestId, Wanted
from hicache.keys import TOKEN_NBYTES
from hicache.tools.replay.settings import Settings
from hicache.tools.replay.tally import Tally
from hicache.tools.replay.workload import Job
from hicache.tools.replay.world import World


@dataclass(slots=True)
class _Running:
    """A request that has its lease."""

    job: Job
    num_hit: int
    loads: set[OpId]


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
        self._prefill_free_at = 0.0
        self._held_back: dict[int, list[Job]] = {}
        """Jobs that continue one which has not ended, by its index."""
        self._has_ended: set[int] = set()
        self._is_stale = False
        """Whether a waiting request may get another answer now than it got last."""

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
        if isinstance(ended, Load):
            for running in self._loading.pop(ended.op, ()):
                running.loads.discard(ended.op)
                if not running.loads:
                    self._prefill(running)

    # ------------------------------------------------------------ the life of a request

    def _arrive(self, job: Job) -> None:
        self._waiting.append(job)
        self._world.send(
            Arrived(RequestId(job.index), job.namespace, job.tokens, max_hit_tokens=job.num_pages)
        )
        self._is_stale = True

    def _schedule(self) -> None:
        """Let as many waiting requests run as may."""
        self._is_stale = False
        passed_over: list[Job] = []
        while self._waiting and len(self._running) < self._concurrency:
            job = self._waiting[0]
            answer = self._world.send(Wanted(RequestId(job.index), job.num_pages))
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

    def _start(self, job: Job, grant: Grant) -> None:
        self._tally.granted(job.index, grant.hit, self._world.now)
        running = _Running(job, grant.hit.total, set(grant.loads))
        self._running[job.index] = running
        for op in grant.loads:
            self._loading.setdefault(op, []).append(running)
        if not running.loads:
            self._prefill(running)

    def _prefill(self, running: _Running) -> None:
        """Compute what is not hit, behind the prefills that were there before."""
        job, tally = running.job, self._tally
        share = running.num_hit / job.num_pages if job.num_pages else 0.0
        num_tokens = max(1, round(job.num_input_tokens * (1 - share)))  # a logit is needed
        start = max(self._world.now, self._prefill_free_at)
        end = start + num_tokens / self._prefill_tokens_per_s
        self._prefill_free_at = end
        tally.outcomes[job.index].ttft_s = end - job.time_s
        self._plan(end, False, running)

    def _take(self, due: _Due) -> None:
        running, world = due.running, self._world
        job = running.job
        if due.is_end:
            del self._running[job.index]
            self._end(job)
            return
        rest = job.tokens[running.num_hit * TOKEN_NBYTES :]
        if rest:
            world.send(Computed(RequestId(job.index), rest))
        self._plan(world.now + job.num_output_tokens / self._decode_tokens_per_s, True, running)

    def _end(self, job: Job) -> None:
        self._world.send(Released(RequestId(job.index)))
        self._is_stale = bool(self._waiting)
        self._has_ended.add(job.index)
        for held_back in self._held_back.pop(job.index, ()):
            self._arrive(held_back)

    def _plan(self, time_s: float, is_end: bool, running: _Running) -> None:
        self._num_due += 1
        heapq.heappush(self._due, _Due(time_s, self._num_due, is_end, running))
