"""A trace as a replay needs it: requests in the order in which they arrive, cut into pages.

The planner's tokens are *grains*: a grain is a page, or a block where a page holds several of
them, so that what larger pages lose and save is the planner's doing. Where a block holds several
pages, they are found or missed together: smaller pages invent no hit.

A request leaves its prompt behind, the last, partial page included. With *outputs* it leaves what
a server leaves: the whole pages of its prompt and of what was generated. Which pages these are
is known from the request that continues it, if that one has the whole prompt before it; else they
are pages that nobody will ask for.
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
    """So many at once: each of so many lanes begins its next session when one has ended."""
    sessions_per_s: float | None = None
    """At random, this many a second in the mean."""
    seed: int = 0

    def describe(self) -> str:
        """Return it in words."""
        if self.num_sessions is not None:
            plural = "" if self.num_sessions == 1 else "s"
            return f"{self.num_sessions} session{plural} at once"
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
    """Its input, one grain after the other, packed."""
    num_input_tokens: int
    num_output_tokens: int
    after: int | None
    """Index of the request that must have ended before, where the trace has no times of its own:
    the one that this continues, or the last of the session before."""
    num_pages: int
    """Pages of its input; the last one may be partial."""
    num_kept_pages: int
    """Leading pages that others may find, and that may be found for it: all, or the whole ones."""
    output: bytes = b""
    """Grains of the whole pages behind those that are kept, which its output fills."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is replayed."""

    jobs: list[Job]
    page_size: int
    """Tokens a page."""
    grain_tokens: int
    """Tokens that a token of the planner stands for."""
    has_outputs: bool
    """Whether requests leave their outputs behind."""
    format: str
    block_size: int
    note: str
    pace: str
    num_bad_lines: int

    @property
    def page_grains(self) -> int:
        """Grains a page."""
        return self.page_size // self.grain_tokens

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
            "has_outputs": self.has_outputs,
            "note": self.note,
            "num_bad_lines": self.num_bad_lines,
        }


def load(
    trace: Trace,
    *,
    page_size: int | None = None,
    pace: Pace | None = None,
    has_outputs: bool = False,
) -> Workload:
    """Read a trace whole, and say when each request arrives. 4 bytes a grain and request.

    ``has_outputs`` has no effect where the trace does not tell which request continues which.
    """
    pace = pace or Pace()
    if pace.sessions_per_s is not None and pace.sessions_per_s <= 0:
        raise ConfigError(f"--arrival must be more than 0, not {pace.sessions_per_s:g}")
    if pace.num_sessions is not None and pace.sessions_per_s is not None:
        raise ConfigError("--sessions, --arrival: one of them says when sessions begin, not both")
    info = trace.info
    pager = _Pager(info.block_size, page_size or info.block_size)
    jobs, parents = _jobs(trace, pager)
    if not jobs:
        raise ConfigError("the trace has no requests")
    has_outputs = has_outputs and any(parent is not None for parent in parents)
    if has_outputs:
        jobs = _with_outputs(jobs, parents, pager)
    if not info.has_times:
        if pace.num_sessions is None and pace.sessions_per_s is None:
            pace = replace(pace, num_sessions=1)
        jobs = _start_sessions(jobs, pace)
    elif pace.num_sessions is not None or pace.sessions_per_s is not None:
        raise ConfigError("--sessions and --arrival are for traces without times; this one has")
    return Workload(
        _in_order(jobs), pager.page_size, pager.grain_tokens, has_outputs, info.format,
        info.block_size, info.note, pace.describe(), info.num_bad_lines,
    )  # fmt: skip


def _jobs(trace: Trace, pager: "_Pager") -> tuple[list[Job], list[int | None]]:
    """Return all requests in the order of the trace, and which one each continues."""
    info = trace.info
    namespaces: dict[str, NamespaceDigest] = {}
    jobs: list[Job] = []
    parents: list[int | None] = []
    for number, request in enumerate(trace):
        digest = namespaces.get(request.tenant)
        if digest is None:
            digest = NamespaceDigest(sha256(request.tenant.encode()).digest())
            namespaces[request.tenant] = digest
        num_pages = -(-request.num_input_tokens // pager.page_size)
        num_whole = request.num_input_tokens // pager.page_size
        parents.append(request.parent)
        jobs.append(
            Job(
                number, number, request.time_s or 0.0, request.session, digest,
                pager.grains(request, has_blocks=info.has_blocks),
                request.num_input_tokens, request.num_output_tokens,
                None if info.has_times else request.parent,
                num_pages, num_pages if pager.page_grains == 1 else num_whole,
            )
        )  # fmt: skip
    return jobs, parents


class _Pager:
    """Cuts blocks into grains."""

    def __init__(self, block_size: int, page_size: int) -> None:
        self.block_size, self.page_size = block_size, page_size
        self.grain_tokens = min(block_size, page_size)
        self.page_grains = page_size // self.grain_tokens
        if block_size % page_size and page_size % block_size:
            raise ConfigError(
                f"--page-size {page_size}: must divide the trace's block of {block_size} tokens, "
                "or be a multiple of it"
            )
        self._ids: dict[int, int] = {}
        self._num_private = 0

    def grains(self, request: TraceRequest, *, has_blocks: bool) -> bytes:
        """Return the grains of a request, packed."""
        num_grains = -(-request.num_input_tokens // self.grain_tokens)
        if not has_blocks:  # nothing is known to be shared
            return self.private(num_grains)
        if self.grain_tokens == self.block_size:
            return request.blocks.tobytes()
        return self._cut(request.blocks)[:num_grains].tobytes()

    def private(self, num_grains: int) -> bytes:
        """Return grains that no request asks for: their ids count down from -1."""
        first, self._num_private = self._num_private + 1, self._num_private + num_grains
        return array("i", range(-first, -first - num_grains, -1)).tobytes()

    def _cut(self, blocks: "array[int]") -> "array[int]":
        """Several grains for each block."""
        step, ids = self.block_size // self.page_size, self._ids
        grains = array("i")
        for block in blocks:
            first = ids.setdefault(block, len(ids)) * step
            grains.extend(range(first, first + step))
        return grains


def _with_outputs(jobs: list[Job], parents: list[int | None], pager: _Pager) -> list[Job]:
    """Have requests leave whole pages only, those of their outputs too."""
    continued_by: dict[int, Job] = {}
    for job, parent in zip(jobs, parents, strict=True):
        if parent is not None:
            continued_by.setdefault(parent, job)
    page_nbytes = pager.page_grains * TOKEN_NBYTES
    result = []
    for job in jobs:
        num_whole = job.num_input_tokens // pager.page_size
        end = (job.num_input_tokens + job.num_output_tokens) // pager.page_size
        start, following = num_whole * page_nbytes, continued_by.get(job.number)
        output = b""
        if following is not None and following.tokens.startswith(job.tokens[:start]):
            last = min(end, following.num_input_tokens // pager.page_size)
            output = following.tokens[start : last * page_nbytes]
        num_missing = end - num_whole - len(output) // page_nbytes
        if num_missing > 0:
            output += pager.private(num_missing * pager.page_grains)
        result.append(replace(job, num_kept_pages=num_whole, output=output))
    return result


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
        return [replace(job, time_s=job.time_s + starts[job.session]) for job in jobs]
    lasts: dict[str, int] = {}
    for job in sorted(jobs, key=lambda job: job.time_s):
        lasts[job.session] = job.number
    before: dict[str, int | None] = {}
    free: list[tuple[float, int]] = [(0.0, lane) for lane in range(pace.num_sessions or 1)]
    last_of: list[int | None] = [None] * len(free)
    for session, duration in durations.items():
        starts[session], lane = heapq.heappop(free)
        before[session], last_of[lane] = last_of[lane], lasts[session]
        heapq.heappush(free, (starts[session] + duration + MIN_GAP_S, lane))
    return [
        replace(
            job,
            time_s=job.time_s + starts[job.session],
            after=before[job.session] if job.after is None else job.after,
        )
        for job in jobs
    ]


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
