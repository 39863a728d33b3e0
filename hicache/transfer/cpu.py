"""Copies where L1 is a tensor on the CPU: one thread that copies whole pages.

A page of all layers is one stretch of memory, and a load takes about 1 % of the time that
computing its tokens would, so a load arrives as a whole: parts by layer would only add calls.
"""

import logging
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hicache.actions import Tier
from hicache.errors import TransferError
from hicache.events import Finished, OpId
from hicache.layout import KVLayout
from hicache.transfer.base import Pool, Transfer, Wake
from hicache.transfer.runs import Run, pieces, runs

logger = logging.getLogger(__name__)

_TURN_NBYTES = 64 << 20
"""A back-up lets loads pass after this much: some milliseconds."""

_PIECE_ELEMENTS = 1 << 15
"""torch copies more than this with several threads, which would compete with the computation for
processors. One element is 16 bytes where the page size allows."""


@dataclass(slots=True, eq=False)
class _Job:
    op: OpId
    source: Tensor
    target: Tensor
    num_pages: int
    turns: Iterator[Sequence[Run]]
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
        self._device = _flat(device.pages, self._layout)
        self._host = _flat(host.pages, self._layout)
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
        self._thread.start()

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

    def wait(self, op: OpId, layer: int) -> None:
        """Block until the whole load has arrived."""
        assert 0 <= layer < self._layout.num_layers
        with self._condition:
            job = self._by_op.get(op)
        if job is not None:
            job.is_over.wait()

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
        source: Tensor,
        target: Tensor,
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

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
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
            self._finished.append(Finished(job.op, [is_done] * job.num_pages))
        job.is_over.set()
        if self._wake is not None:
            self._wake.set()


def copy_pages(source: Tensor, target: Tensor, chosen: Sequence[Run]) -> None:
    """Copy whole pages between two pools, ``[N, elements of a page]`` each.

    All copies are one call into torch: it lets go of the GIL once, where a call a page would
    wait for it a page (5 ms each, behind a thread busy in Python).
    """
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    page = source.shape[1]
    for from_slot, to_slot, length in chosen:
        if length == 1:
            from_pages, to_pages = source[from_slot], target[to_slot]
        else:
            from_pages = source[from_slot : from_slot + length].view(-1)
            to_pages = target[to_slot : to_slot + length].view(-1)
        if length * page <= _PIECE_ELEMENTS:
            sources.append(from_pages)
            targets.append(to_pages)
        else:
            sizes = _piece_sizes(length * page)
            sources += from_pages.split_with_sizes(sizes)
            targets += to_pages.split_with_sizes(sizes)
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _piece_sizes(num_elements: int) -> list[int]:
    whole, rest = divmod(num_elements, _PIECE_ELEMENTS)
    return [_PIECE_ELEMENTS] * whole + ([rest] if rest else [])


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


def _flat(pages: Tensor, layout: KVLayout) -> Tensor:
    """Return the pool as ``[N, elements of a page]`` of the widest element that divides a page."""
    wide = pages.view(len(pages), -1) if len(pages) else pages.new_empty((0, layout.page_nbytes))
    wide = wide.view(torch.uint8)
    for dtype, nbytes in ((torch.complex128, 16), (torch.float64, 8), (torch.float32, 4)):
        if layout.page_nbytes % nbytes == 0:
            return wide.view(dtype)
    return wide
