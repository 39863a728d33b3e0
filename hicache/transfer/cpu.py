"""Copies where L1 is a tensor on the CPU: one thread that copies whole pages.

A page of all layers is one stretch of memory, and a load is short: 1,888 tokens of a small model
arrive in 15 ms, where computing 112 more takes 450. So a load arrives as a whole; by layers it
could save 3 % at best, and small pages would cost more calls.
"""

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hicache.actions import Tier
from hicache.errors import TransferError
from hicache.events import Finished, OpId
from hicache.transfer.base import Pool, Transfer, Wake
from hicache.transfer.runs import Run, pieces, runs

logger = logging.getLogger(__name__)

_TURN_NBYTES = 64 << 20
"""A back-up lets loads pass after this much: some milliseconds."""

_ELEMENTS = (torch.float64, torch.float32, torch.uint8)
"""Widest first; torch copies wider ones, which are complex numbers, more slowly."""

_MAX_VIEWS = 1 << 14
"""Pages of a pool whose tensors are kept: to make one costs as much as to copy 10 KiB."""


@dataclass(slots=True, eq=False)
class _Job:
    op: OpId
    source: "PageViews"
    target: "PageViews"
    num_pages: int
    turns: Iterator[Sequence[Run]]
    asked: float = field(default_factory=time.monotonic)
    is_over: threading.Event = field(default_factory=threading.Event)


class CpuTransfer(Transfer):
    """Copies in a thread of its own, loads before back-ups, without the GIL while bytes move.

    Back-ups that wait are bounded by ``max_waiting_pages``; one beyond it fails at once, so that
    its pages count as not backed up. Loads are never refused: each has a page of L1 to itself,
    so L1 bounds them.
    """

    num_layer_groups = 1
    is_polled = False

    def __init__(
        self,
        device: Pool,
        host: Pool,
        wake: Wake | None = None,
        max_waiting_pages: int = 1 << 20,
    ) -> None:
        assert device.layout == host.layout
        self.num_dropped = 0
        """Back-ups that found the queue full."""
        self._layout = device.layout
        self._device = PageViews(device)
        self._host = PageViews(host)
        self._wake = wake
        self._max_waiting_pages = max_waiting_pages
        self._turn_pages = max(1, _TURN_NBYTES // self._layout.page_nbytes)
        self._condition = threading.Condition()  # guards all below
        self._loads: deque[_Job] = deque()
        self._back_ups: deque[_Job] = deque()
        self._by_op: dict[OpId, _Job] = {}
        self._num_waiting_pages = 0
        self._finished: list[Finished] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hicache-transfer", daemon=True)
        self._is_alone = threading.Event()
        self._start()

    def load(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Copy pages L2 to L1, before any back-up that waits."""
        self._ask(self._loads, self._job(op, self._host, self._device, source, target))

    def back_up(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Copy pages L1 to L2; fail at once where too many wait already."""
        job = self._job(op, self._device, self._host, source, target)
        with self._condition:
            is_full = self._num_waiting_pages + job.num_pages > self._max_waiting_pages
            self._num_waiting_pages += 0 if is_full else job.num_pages
        if is_full:
            self.num_dropped += 1
            self._finish(job, is_done=False)
        else:
            self._ask(self._back_ups, job)

    def copy_page(self, op: OpId, source_tier: Tier, source: int, target: int) -> None:
        """Copy one page of L1 or L2 into L1, in turn with loads."""
        assert source_tier != "storage"
        origin = self._device if source_tier == "device" else self._host
        slots = array("i", [source]), array("i", [target])
        self._ask(self._loads, self._job(op, origin, self._device, *slots))

    def wait(self, op: OpId, layer: int) -> int:
        """Block until the whole load has arrived; return the number of layers."""
        assert 0 <= layer < self._layout.num_layers
        with self._condition:
            job = self._by_op.get(op)
        if job is not None:
            job.is_over.wait()
        return self._layout.num_layers

    def fence(self) -> None:
        """Do nothing: on a CPU what was computed is there when the call returns."""

    def drain(self) -> list[Finished]:
        """Return what is over since the last call, in the order in which it ended."""
        with self._condition:
            finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Wait for every copy that was asked for, and join the thread."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _job(
        self,
        op: OpId,
        source: "PageViews",
        target: "PageViews",
        source_slots: "array[int]",
        target_slots: "array[int]",
    ) -> _Job:
        assert not source_slots or 0 <= min(source_slots) <= max(source_slots) < len(source)
        assert not target_slots or 0 <= min(target_slots) <= max(target_slots) < len(target)
        whole = runs(source_slots[:], target_slots[:])
        turns = _turns(pieces(whole, self._turn_pages), self._turn_pages)
        return _Job(op, source, target, len(source_slots), turns)

    def _ask(self, queue: deque[_Job], job: _Job) -> None:
        with self._condition:
            if self._is_closed:
                raise TransferError("no copies after close")
            assert job.op not in self._by_op
            queue.append(job)
            self._by_op[job.op] = job
            self._condition.notify()

    def _start(self) -> None:
        """Start the thread, which copies alone: helpers of torch would take the processors of
        the computation.

        torch sets the number of helpers for the thread that asks and for those that come later.
        So the thread sets its own, and this one puts back what others have.
        """
        num_threads = torch.get_num_threads()
        self._thread.start()
        self._is_alone.wait()
        torch.set_num_threads(num_threads)

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        torch.get_num_threads()  # makes torch set this thread up; it would undo the next line
        torch.set_num_threads(1)
        self._is_alone.set()
        while (queue := self._next()) is not None:
            job = queue[0]
            turn: Sequence[Run] | None = None
            is_done = True
            try:
                if turn := next(job.turns, None):
                    copy_pages(job.source, job.target, turn)
            except Exception:
                logger.exception("a copy of %d pages failed", job.num_pages)
                turn, is_done = None, False
            if turn is None:
                with self._condition:
                    queue.popleft()
                    if queue is self._back_ups:
                        self._num_waiting_pages -= job.num_pages
                self._finish(job, is_done)

    def _next(self) -> deque[_Job] | None:
        """Return the queue whose first job is next, once there is one; ``None`` at the end."""
        with self._condition:
            while not (self._loads or self._back_ups or self._is_closed):
                self._condition.wait()
            return self._loads or self._back_ups or None

    def _finish(self, job: _Job, is_done: bool) -> None:
        with self._condition:
            self._by_op.pop(job.op, None)
            seconds = time.monotonic() - job.asked
            self._finished.append(Finished(job.op, [is_done] * job.num_pages, seconds=seconds))
        job.is_over.set()
        if self._wake is not None:
            self._wake.set()


class PageViews:
    """The pages of a pool as flat tensors, made when they are first used."""

    def __init__(self, pool: Pool) -> None:
        page_nbytes = pool.layout.page_nbytes
        flat = pool.pages.view(-1).view(torch.uint8)
        dtype = next(dtype for dtype in _ELEMENTS if page_nbytes % dtype.itemsize == 0)
        self._pages = flat.view(dtype).view(len(pool.pages), -1 if len(pool.pages) else 1)
        self._made: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def run(self, first: int, length: int) -> Tensor:
        """Return ``length`` pages as one flat tensor."""
        if length > 1:
            return self._pages[first : first + length].view(-1)
        page = self._made.get(first)
        if page is None:
            page = self._pages[first]
            if len(self._made) < _MAX_VIEWS:
                self._made[first] = page
        return page


def copy_pages(source: PageViews, target: PageViews, chosen: Sequence[Run]) -> None:
    """Copy whole pages between two pools.

    All copies are one call into torch: it lets go of the GIL once, where a call a page would
    wait for it a page (5 ms each, behind a thread busy in Python).
    """
    targets = [target.run(run.target, run.length) for run in chosen]
    sources = [source.run(run.source, run.length) for run in chosen]
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _turns(whole: Iterator[Run], turn_pages: int) -> Iterator[Sequence[Run]]:
    """Yield runs in groups of about ``turn_pages`` pages."""
    turn: list[Run] = []
    num_pages = 0
    for run in whole:
        turn.append(run)
        num_pages += run.length
        if num_pages >= turn_pages:
            yield turn
            turn, num_pages = [], 0
    if turn:
        yield turn
