"""Copies where L1 is on a GPU: one stream for loads, one for back-ups.

The fences, each of which a test takes away to see that it is needed:

==================  ==================================  ========================================
who waits           for what                            else
==================  ==================================  ========================================
load, copy_page     all that was computed so far        a forward that still runs reads or
                                                        writes over what was loaded
back-up             all that was computed so far        pages are copied before they are
                                                        computed
computation         the layer group of a load (wait)    attention reads what is not there yet
copy_page           the loads before it (same stream)   a page is copied before it is loaded
host (drain)        the event behind the last copy      slots are reused under a copy
==================  ==================================  ========================================

"So far" is both what the current stream holds when the copy is asked for, and what it held at
the last ``fence``, which may have been another stream.
"""

import logging
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from hicache.actions import Tier
from hicache.errors import TransferError
from hicache.events import Finished, OpId
from hicache.layout import KVLayout
from hicache.transfer.base import Pool, Transfer
from hicache.transfer.runs import Run, pieces, runs
from hicache.transfer.streams import Event, Stream, Streams

logger = logging.getLogger(__name__)

_MAX_LAYER_GROUPS = 4
_GROUP_NBYTES = 256 << 10
"""Least bytes of a page that are a copy of their own: a copy costs microseconds to launch."""

_MAX_PIECES_IN_FLIGHT = 512
"""Of back-ups. A stream takes about 1,000 launches; the next one blocks the thread."""


class PinnedPool(Pool, Protocol):
    """L2 that is pinned chunk by chunk."""

    @property
    def chunk_pages(self) -> int:
        """Slots that no copy may cross a multiple of; 0 for none."""
        ...


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy that was put into a stream."""

    op: OpId
    num_pages: int
    begun: Event
    """Before everything."""
    arrived: list[Event]
    """Behind each layer group, and so the last one behind everything."""
    is_whole: bool
    """Whether everything could be put into the stream."""
    num_pieces: int


@dataclass(slots=True, eq=False)
class _BackUp:
    """A back-up that waits until the stream has room."""

    op: OpId
    source: "array[int]"
    target: "array[int]"
    behind: Sequence[Event]


class CudaTransfer(Transfer):
    """Copies in two streams of their own; completions are polled, never waited for.

    A load is put into its stream at once, for the forward that needs it. Back-ups wait here
    while ``_MAX_PIECES_IN_FLIGHT`` are in theirs; one beyond ``max_waiting_pages`` fails at once,
    so that its pages count as not backed up.
    """

    is_polled = True

    def __init__(
        self,
        device: Pool,
        host: PinnedPool,
        streams: Streams,
        num_layer_groups: int | None = None,
        max_waiting_pages: int = 1 << 20,
    ) -> None:
        assert device.layout == host.layout
        layout = device.layout
        self.num_layer_groups = num_layer_groups or _num_layer_groups(layout)
        self.num_dropped = 0
        """Back-ups that found the queue full."""
        self._layers = _layer_groups(layout.num_layers, self.num_layer_groups)
        self._group_of = [
            group for group, (first, end) in enumerate(self._layers) for _ in range(first, end)
        ]
        self._device = device.pages
        self._host = host.pages
        self._chunk_pages = host.chunk_pages
        self._streams = streams
        self._load_stream = streams.stream()
        self._back_up_stream = streams.stream()
        self._fence = streams.current().record_event()
        self._loads: deque[_Copy] = deque()
        self._back_ups: deque[_Copy] = deque()
        self._by_op: dict[OpId, _Copy] = {}
        self._waiting: deque[_BackUp] = deque()
        self._num_waiting_pages = 0
        self._max_waiting_pages = max_waiting_pages
        self._over: list[Finished] = []  # beside what is in the streams
        self._is_closed = False

    def load(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Put a load into its stream, layer group by layer group."""
        found = list(pieces(runs(source, target), len(source) or 1, self._chunk_pages))
        self._put_load(op, self._host, found, len(source))

    def copy_page(self, op: OpId, source_tier: Tier, source: int, target: int) -> None:
        """Put the copy of a page into the stream of loads."""
        assert source_tier != "storage"
        origin = self._device if source_tier == "device" else self._host
        self._put_load(op, origin, [Run(source, target, 1)], 1)

    def back_up(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Put a back-up into its stream, or in line for it; fail at once where that is full."""
        self._assert_open()
        if self._num_waiting_pages + len(source) > self._max_waiting_pages:
            self.num_dropped += 1
            self._over.append(Finished(op, [False] * len(source)))
            return
        self._num_waiting_pages += len(source)
        self._waiting.append(_BackUp(op, source[:], target[:], self._computed_so_far()))
        self._put_back_ups()

    def wait(self, op: OpId, layer: int) -> None:
        """Let the current stream wait until this layer of a load has arrived."""
        assert 0 <= layer < len(self._group_of)
        copy = self._by_op.get(op)
        if copy is None:
            return
        # One that failed has one event, behind whatever could be started of it.
        group = min(self._group_of[layer], len(copy.arrived) - 1)
        self._streams.current().wait_event(copy.arrived[group])

    def fence(self) -> None:
        """Let copies asked for from now on start behind the current stream as it is now."""
        self._fence = self._streams.current().record_event()

    def drain(self) -> list[Finished]:
        """Return what has passed since the last call; put waiting back-ups into their stream."""
        finished, self._over = self._over, []
        for queue in (self._loads, self._back_ups):
            while queue and (outcome := _outcome(queue[0])) is not None:
                copy = queue.popleft()
                self._by_op.pop(copy.op, None)
                finished.append(self._finished(copy, outcome))
        self._put_back_ups()
        return finished

    def close(self) -> None:
        """Wait for every copy that was asked for."""
        while self._waiting:
            _synchronize(self._back_up_stream)
            finished = self.drain()
            self._over += finished
        self._is_closed = True
        _synchronize(self._load_stream)
        _synchronize(self._back_up_stream)

    # ------------------------------------------------------------ into the streams

    def _put_load(self, op: OpId, origin: Tensor, found: Sequence[Run], num_pages: int) -> None:
        self._assert_open()
        assert op not in self._by_op
        for event in self._computed_so_far():
            self._load_stream.wait_event(event)
        parts = [_views(origin, self._device, found, layers) for layers in self._layers]
        copy = self._put(op, self._load_stream, parts, num_pages)
        self._loads.append(copy)
        self._by_op[op] = copy

    def _put_back_ups(self) -> None:
        in_flight = sum(copy.num_pieces for copy in self._back_ups)
        while self._waiting and in_flight < _MAX_PIECES_IN_FLIGHT:
            asked = self._waiting.popleft()
            num_pages = len(asked.source)
            self._num_waiting_pages -= num_pages
            for event in asked.behind:
                self._back_up_stream.wait_event(event)
            whole = runs(asked.source, asked.target)
            found = list(pieces(whole, num_pages or 1, target_chunk=self._chunk_pages))
            parts = [_views(self._device, self._host, found, None)]
            copy = self._put(asked.op, self._back_up_stream, parts, num_pages)
            self._back_ups.append(copy)
            in_flight += copy.num_pieces

    def _put(
        self,
        op: OpId,
        stream: Stream,
        parts: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
        num_pages: int,
    ) -> _Copy:
        """Put copies into a stream with an event behind each part.

        What fails half-way is over when that half is: its slots are written to until then.
        """
        begun = stream.record_event()
        arrived: list[Event] = []
        is_whole = True
        try:
            with self._streams.use(stream):
                for targets, sources in parts:
                    self._streams.copy(targets, sources)
                    arrived.append(stream.record_event())
        except RuntimeError:
            logger.exception("a copy of %d pages could not be started", num_pages)
            is_whole = False
            arrived = [stream.record_event()]
        num_pieces = sum(len(targets) for targets, _ in parts)
        return _Copy(op, num_pages, begun, arrived, is_whole, num_pieces)

    def _finished(self, copy: _Copy, outcome: bool) -> Finished:
        seconds = None
        if outcome:
            seconds = self._streams.seconds_between(copy.begun, copy.arrived[-1])
        return Finished(copy.op, [outcome] * copy.num_pages, seconds=seconds)

    def _computed_so_far(self) -> Sequence[Event]:
        return self._fence, self._streams.current().record_event()

    def _assert_open(self) -> None:
        if self._is_closed:
            raise TransferError("no copies after close")


def _outcome(copy: _Copy) -> bool | None:
    """Return how a copy ended, or ``None`` while it runs."""
    try:
        return copy.is_whole if copy.arrived[-1].query() else None
    except RuntimeError:
        logger.exception("a copy of %d pages failed", copy.num_pages)
        return False


def _synchronize(stream: Stream) -> None:
    try:
        stream.synchronize()
    except RuntimeError:
        logger.exception("the GPU failed; its copies are over")


def _views(
    source: Tensor, target: Tensor, found: Sequence[Run], layers: tuple[int, int] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return targets and sources of the copies of some layers, each contiguous.

    Some layers of several pages are not contiguous, which torch would copy by way of memory that
    is not pinned: they go page by page.
    """
    if layers is None or layers == (0, source.shape[1]):
        return (
            [target[run.target : run.target + run.length] for run in found],
            [source[run.source : run.source + run.length] for run in found],
        )
    first, end = layers
    return (
        [target[slot, first:end] for slot in _slots(found, is_source=False)],
        [source[slot, first:end] for slot in _slots(found, is_source=True)],
    )


def _slots(found: Sequence[Run], *, is_source: bool) -> Iterator[int]:
    for run in found:
        start = run.source if is_source else run.target
        yield from range(start, start + run.length)


def _num_layer_groups(layout: KVLayout) -> int:
    return max(1, min(_MAX_LAYER_GROUPS, layout.num_layers, layout.page_nbytes // _GROUP_NBYTES))


def _layer_groups(num_layers: int, num_groups: int) -> list[tuple[int, int]]:
    """Return first layer and layer behind the last of each group."""
    assert 0 < num_groups <= num_layers
    bounds = [group * num_layers // num_groups for group in range(num_groups + 1)]
    return list(pairwise(bounds))
