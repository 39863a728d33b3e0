"""A trace as a replay needs it: requests in the order in which they arrive, cut into pages.

A page of the replay is one pseudo-token of the planner. Where a page holds several blocks, it is
the same page only where all of them, and all before them, are the same; where a block holds
several pages, they are found or missed together, so that smaller pages invent no hit.
"""

import heapq
import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

from hicache.errors import ConfigError
from hicache.keys import TOKEN_NBYTES, NamespaceDigest
from hicache.tools.traces.normal import Trace, TraceRequest

MIN_GAP_S = 1e-6
"""Requests of the same moment arrive so far apart, in the order of the trace."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When the sessions of a trace begin that does not say so."""

    num_sessions: int | None = None
    """So many at once: when one ends the next begins."""
    sessions_per_s: float | None = None
    """At random, this many a second in the mean."""
    seed: int = 0

    def describe(self) -> str:
        """Return it in words."""
        if self.num_sessions is not None:
            return f"{self.num_sessions} sessions at once"
        if self.sessions_per_s is not None:
            return f"sessions arrive at random, {self.sessions_per_s:g} a second (seed {self.seed})"
        return "as the trace says"


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload."""

    index: int
    """In the order of arrival."""
    number: int
    """In the order of the trace."""
    time_s: float
    session: str
    namespace: NamespaceDigest
    tokens: bytes
    """Its pages, one pseudo-token each, packed."""
    num_input_tokens: int
    num_output_tokens: int
    after: int | None
    """Index of the request that must have ended before, where the trace has no times of its own."""

    @property
    def num_pages(self) -> int:
        """Pages of its input; the last one may be partial."""
        return len(self.tokens) // TOKEN_NBYTES


@dataclass(frozen=True, slots=True)
class Workload:
    """What is replayed."""

    jobs: list[Job]
    page_size: int
    """Tokens a page."""
    format: str
    block_size: int
    note: str
    pace: str
    num_bad_lines: int

    @property
    def num_pages(self) -> int:
        """Pages that all requests refer to."""
        return sum(job.num_pages for job in self.jobs)

    def describe(self) -> dict[str, object]:
        """Return it as a report has it, but for what its sharing is."""
        jobs = self.jobs
        return {
            "format": self.format,
            "block_size": self.block_size,
            "num_requests": len(jobs),
            "num_sessions": len({job.session for job in jobs}),
            "num_pages": self.num_pages,
            "num_input_tokens": sum(job.num_input_tokens for job in jobs),
            "num_output_tokens": sum(job.num_output_tokens for job in jobs),
            "duration_s": jobs[-1].time_s - jobs[0].time_s if jobs else 0.0,
            "pace": self.pace,
            "note": self.note,
            "num_bad_lines": self.num_bad_lines,
        }


def load(trace: Trace, *, page_size: int | None = None, pace: Pace | None = None) -> Workload:
    """Read a trace whole, and say when each request arrives. 4 bytes a page and request."""
    pace = pace or Pace()
    if pace.sessions_per_s is not None and pace.sessions_per_s <= 0:
        raise ConfigError(f"--arrival must be more than 0, not {pace.sessions_per_s:g}")
    info = trace.info
    pager = _Pager(info.block_size, page_size or info.block_size)
    namespaces: dict[str, NamespaceDigest] = {}
    jobs: list[Job] = []
    for number, request in enumerate(trace):
        digest = namespaces.get(request.tenant)
        if digest is None:
            digest = NamespaceDigest(sha256(request.tenant.encode()).digest())
            namespaces[request.tenant] = digest
        jobs.append(
            Job(
                number, number, request.time_s or 0.0, request.session, digest,
                pager.pages(request, has_blocks=info.has_blocks),
                request.num_input_tokens, request.num_output_tokens,
                None if info.has_times else request.parent,
            )
        )  # fmt: skip
    if not jobs:
        raise ConfigError("the trace has no requests")
    if not info.has_times:
        if pace.num_sessions is None and pace.sessions_per_s is None:
            pace = replace(pace, num_sessions=1)
        jobs = _start_sessions(jobs, pace)
    elif pace.num_sessions is not None or pace.sessions_per_s is not None:
        raise ConfigError("--sessions and --arrival are for traces without times; this one has")
    return Workload(
        _in_order(jobs), pager.page_size, info.format, info.block_size, info.note,
        pace.describe(), info.num_bad_lines,
    )  # fmt: skip


class _Pager:
    """Cuts blocks into pages, or joins them."""

    def __init__(self, block_size: int, page_size: int) -> None:
        self.block_size, self.page_size = block_size, page_size
        if block_size % page_size and page_size % block_size:
            raise ConfigError(
                f"--page-size {page_size}: must divide the trace's block of {block_size} tokens, "
                "or be a multiple of it"
            )
        self._ids: dict[object, int] = {}
        self._num_private = 0

    def pages(self, request: TraceRequest, *, has_blocks: bool) -> bytes:
        """Return the pages of a request, packed."""
        num_pages = -(-request.num_input_tokens // self.page_size)
        if not has_blocks:  # nothing is known to be shared
            first, self._num_private = self._num_private, self._num_private + num_pages
            return array("i", range(first, first + num_pages)).tobytes()
        if self.page_size == self.block_size:
            return request.blocks.tobytes()
        if self.page_size > self.block_size:
            return self._join(request.blocks).tobytes()
        return self._cut(request.blocks)[:num_pages].tobytes()

    def _join(self, blocks: "array[int]") -> "array[int]":
        """Pages of several blocks. Ids are chained, so the last block names the page, but for
        its length."""
        step, ids = self.page_size // self.block_size, self._ids
        pages = array("i")
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            pages.append(ids.setdefault((part[-1], len(part)), len(ids)))
        return pages

    def _cut(self, blocks: "array[int]") -> "array[int]":
        """Several pages for each block."""
        step, ids = self.block_size // self.page_size, self._ids
        pages = array("i")
        for block in blocks:
            first = ids.setdefault(block, len(ids)) * step
            pages.extend(range(first, first + step))
        return pages


def _start_sessions(jobs: list[Job], pace: Pace) -> list[Job]:
    """Give each session a start, in the order of the trace."""
    durations: dict[str, float] = {}
    for job in jobs:
        durations[job.session] = max(durations.get(job.session, 0.0), job.time_s)
    starts: dict[str, float] = {}
    if pace.sessions_per_s is not None:
        rng, now = random.Random(pace.seed), 0.0
        for session in durations:
            now += rng.expovariate(pace.sessions_per_s)
            starts[session] = now
    else:
        free = [0.0] * (pace.num_sessions or 1)
        for session, duration in durations.items():
            starts[session] = heapq.heappop(free)
            heapq.heappush(free, starts[session] + duration + MIN_GAP_S)
    return [replace(job, time_s=job.time_s + starts[job.session]) for job in jobs]


def _in_order(jobs: Iterable[Job]) -> list[Job]:
    """Sort by time, keep the order of the trace within a moment, and tell moments apart."""
    ordered = sorted(jobs, key=lambda job: job.time_s)
    index_of = {job.number: index for index, job in enumerate(ordered)}
    result: list[Job] = []
    time_s = ordered[0].time_s - MIN_GAP_S
    for index, job in enumerate(ordered):
        time_s = max(job.time_s, time_s + MIN_GAP_S)
        after = None if job.after is None else index_of[job.after]
        result.append(replace(job, index=index, time_s=time_s, after=after))
    return result
