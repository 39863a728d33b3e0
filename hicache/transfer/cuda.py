"""Copies where L1 is on a GPU: a stream for loads, one for back-ups, one for single pages.

The fences, each of which a test takes away to see that it is needed:

==================  ==================================  ========================================
who waits           for what                            else
==================  ==================================  ========================================
load, copy_page     all that was computed so far        a forward that still runs reads or
                                                        writes over what was loaded
back-up             all that was computed so far        pages are copied before they are
                                                        computed
computation         the layer group of a load (wait)    attention reads what is not there yet
copy_page           the load that brings its source     a page is copied before it is loaded
host (drain)        the event behind the last copy      slots are reused under a copy
==================  ==================================  ========================================

A page that is copied for its first tokens has a stream of its own: behind the load of the same
request it would arrive last, and the forward waits for it before its first layer.

"So far" is both what the current stream holds when the copy is asked for, and what it held at
the last ``fence``, which may have been another stream.
"""

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from hicache.actions import Tier
from hicache.errors import TransferError
from hicache.events import Finished, OpId
from hicache.layout import KVLayout
from hicache.transfer.base import Pool, Transfer
from hicache.transfer.lane import Copy, Lane, Part
from hicache.transfer.runs import Run, pieces, runs
from hicache.transfer.staging import Stretch, stretches
from hicache.transfer.streams import Event, Streams

logger = logging.getLogger(__name__)

_MAX_LAYER_GROUPS = 8
"""Of a load whose copies keep up with the computation, one group's time is not hidden."""

_GROUP_NBYTES = 512 << 10
"""Least bytes of a page that are a copy of their own: a copy costs microseconds to launch, in
which a link of 50 GB/s moves as many times 50 KB."""

_MAX_PIECES_IN_FLIGHT = 512
"""A stream takes about 1,000 launches; the next one blocks the thread."""

_LEAST_STAGED = 8
"""Pages that a buffer holds at least, for it to be one."""

_PART_PIECES = 256
"""Copies that are put into a stream at once, at most."""


class PinnedPool(Pool, Protocol):
    """L2 that is pinned chunk by chunk."""

    @property
    def chunk_pages(self) -> int:
        """Slots that no copy may cross a multiple of; 0 for none."""
        ...


@dataclass(frozen=True, slots=True)
class _Way:
    """What is copied where."""

    source: Tensor
    """Pages as bytes, ``[N, page_nbytes]``; so is ``target``."""
    target: Tensor
    chosen: Sequence[Run]
    groups: Sequence[slice]
    """Bytes of a page, layer group by layer group."""


class CudaTransfer(Transfer):
    """Copies in streams of their own; completions are polled, never waited for.

    A stream holds about ``_MAX_PIECES_IN_FLIGHT`` copies; what is more waits here until ``drain``
    finds room, or the computation waits for it. A back-up beyond ``max_waiting_pages`` fails at
    once, so that its pages count as not backed up. So does what a broken GPU cannot be given.
    """

    is_polled = True

    def __init__(
        self,
        device: Pool,
        host: PinnedPool,
        streams: Streams,
        num_layer_groups: int | None = None,
        max_waiting_pages: int = 1 << 20,
        staging_nbytes: int = 0,
    ) -> None:
        """``staging_nbytes`` of the device are a buffer for loads of scattered small pages; 0:
        none, each run is a copy of its own."""
        assert device.layout == host.layout
        layout = device.layout
        self.num_layer_groups = num_layer_groups or count_layer_groups(layout)
        self.num_dropped = 0
        """Back-ups that found the queue full."""
        layers = _layer_groups(layout.num_layers, self.num_layer_groups)
        self._group_of = [
            group for group, (first, end) in enumerate(layers) for _ in range(first, end)
        ]
        self._ends = [end for _, end in layers]
        layer_nbytes = layout.page_nbytes // layout.num_layers
        self._groups = [slice(first * layer_nbytes, end * layer_nbytes) for first, end in layers]
        self._page = slice(0, layout.page_nbytes)
        self._device = _bytes(device.pages, layout)
        self._host = _bytes(host.pages, layout)
        self._chunk_pages = host.chunk_pages
        self._streams = streams
        self._buffer: Tensor | None = None
        if streams.copies_rows and staging_nbytes >= _LEAST_STAGED * layout.page_nbytes:
            self._buffer = torch.empty(
                staging_nbytes, dtype=torch.uint8, device=device.pages.device
            )
        self._loads = Lane(streams, _MAX_PIECES_IN_FLIGHT)
        self._back_ups = Lane(streams, _MAX_PIECES_IN_FLIGHT)
        self._pages = Lane(streams, _MAX_PIECES_IN_FLIGHT)
        self._arriving: dict[OpId, array[int]] = {}
        """The slots that each load under way writes to."""
        self._fence = streams.current().record_event()
        self._by_op: dict[OpId, Copy] = {}
        self._max_waiting_pages = max_waiting_pages
        self._over: list[Finished] = []  # beside what is in the lanes
        self._is_closed = False

    def load(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Put a load into its stream, layer group by layer group."""
        whole = runs(source, target)
        is_cut = self.num_layer_groups > 1 and not self._streams.copies_rows
        longest = 1 if is_cut else len(source) or 1
        found = list(pieces(whole, longest, source_chunk=self._chunk_pages))
        self._assert_open()
        assert op not in self._by_op
        way = _Way(self._host, self._device, found, self._groups)
        copy = self._ask(self._loads, op, way, len(source))
        if copy is not None:
            self._by_op[op] = copy
            self._arriving[op] = target[:]

    def copy_page(self, op: OpId, source_tier: Tier, source: int, target: int) -> None:
        """Put the copy of a page into its stream, behind the load that brings it if one does."""
        self._assert_open()
        assert op not in self._by_op
        assert source_tier != "storage"
        origin = self._device if source_tier == "device" else self._host
        behind: list[Event] = []
        if source_tier == "device":
            for load, slots in self._arriving.items():
                if source in slots:
                    event = self._loads.arrival(self._by_op[load], self.num_layer_groups - 1)
                    behind += [] if event is None else [event]
        way = _Way(origin, self._device, [Run(source, target, 1)], [self._page])
        copy = self._ask(self._pages, op, way, 1, behind)
        if copy is not None:
            self._by_op[op] = copy

    def back_up(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Put a back-up into its stream, or in line for it; fail at once where that is full."""
        self._assert_open()
        num_pages = len(source)
        if self._back_ups.num_waiting_pages + num_pages > self._max_waiting_pages:
            self.num_dropped += 1
            self._over.append(Finished(op, [False] * num_pages))
            return
        whole = runs(source, target)
        found = list(pieces(whole, num_pages or 1, target_chunk=self._chunk_pages))
        way = _Way(self._device, self._host, found, [self._page])
        self._ask(self._back_ups, op, way, num_pages)

    def wait(self, op: OpId, layer: int) -> int:
        """Let the current stream wait for this layer of a load, and the others of its group.

        Return the first layer behind that group.
        """
        assert 0 <= layer < len(self._group_of)
        copy = self._by_op.get(op)
        if copy is None:
            return len(self._group_of)
        is_load = op in self._arriving
        lane = self._loads if is_load else self._pages
        group = self._group_of[layer]
        event = lane.arrival(copy, group)
        if event is not None:
            self._streams.current().wait_event(event)
        return self._ends[group] if is_load else len(self._group_of)

    def fence(self) -> None:
        """Let copies asked for from now on start behind the current stream as it is now."""
        self._fence = self._streams.current().record_event()

    def drain(self) -> list[Finished]:
        """Return what has passed since the last call; put what waits into its stream."""
        finished, self._over = self._over, []
        for lane in (self._loads, self._pages, self._back_ups):
            for copy, outcome in lane.over():
                self._by_op.pop(copy.op, None)
                self._arriving.pop(copy.op, None)
                finished.append(self._finished(copy, outcome))
            lane.advance()
        return finished

    def close(self) -> None:
        """Wait for every copy that was asked for."""
        self._is_closed = True
        for lane in (self._loads, self._pages, self._back_ups):
            lane.finish()

    # ------------------------------------------------------------ into the streams

    def _ask(
        self, lane: Lane, op: OpId, way: _Way, num_pages: int, behind: Sequence[Event] = ()
    ) -> Copy | None:
        """Give a copy to a lane, behind all that was computed so far."""
        try:
            behind = [*behind, *self._computed_so_far()]
        except RuntimeError:
            logger.exception("the GPU failed; %d pages are not copied", num_pages)
            self._over.append(Finished(op, [False] * num_pages))
            return None
        copy = Copy(op, num_pages, len(way.groups), behind, self._parts(way))
        lane.ask(copy)
        return copy

    def _parts(self, way: _Way) -> Iterator[Part]:
        """Yield the copies of each layer group: one a run, and not too many together."""
        is_load = way.target is self._device and way.source is self._host
        for group in way.groups:
            chosen: Sequence[Run | Stretch] = way.chosen
            if is_load and self._buffer is not None:
                width = group.stop - group.start
                room = self._buffer.numel()
                chosen = list(stretches(way.chosen, width, room, self._chunk_pages))
            for start in range(0, len(chosen), _PART_PIECES):
                some = chosen[start : start + _PART_PIECES]
                put = partial(self._copy, way, some, group)
                yield Part(len(some), put, ends_group=start + _PART_PIECES >= len(chosen))

    def _copy(self, way: _Way, chosen: Sequence[Run | Stretch], group: slice) -> None:
        """Put copies into the stream in use."""
        found = [item for item in chosen if isinstance(item, Run)]
        self._streams.copy(way.target, way.source, found, group)
        for item in chosen:
            if isinstance(item, Stretch):
                assert self._buffer is not None
                self._streams.copy_stretch(way.target, way.source, item, group, self._buffer)

    def _finished(self, copy: Copy, outcome: bool) -> Finished:
        seconds = None
        if outcome:
            assert copy.begun is not None
            seconds = self._streams.seconds_between(copy.begun, copy.arrived[-1])
        return Finished(copy.op, [outcome] * copy.num_pages, seconds=seconds)

    def _computed_so_far(self) -> Sequence[Event]:
        return self._fence, self._streams.current().record_event()

    def _assert_open(self) -> None:
        if self._is_closed:
            raise TransferError("no copies after close")


def count_layer_groups(layout: KVLayout) -> int:
    """Return in how many parts pages are loaded: many, but none of them small."""
    most = min(_MAX_LAYER_GROUPS, layout.num_layers)
    return max(1, min(most, layout.page_nbytes // _GROUP_NBYTES))


def _layer_groups(num_layers: int, num_groups: int) -> list[tuple[int, int]]:
    """Return first layer and layer behind the last of each group."""
    assert 0 < num_groups <= num_layers
    bounds = [group * num_layers // num_groups for group in range(num_groups + 1)]
    return list(pairwise(bounds))


def _bytes(pages: Tensor, layout: KVLayout) -> Tensor:
    """Return pages as bytes, ``[N, page_nbytes]``: some layers of one are a stretch of them."""
    return pages.view(-1).view(torch.uint8).view(len(pages), layout.page_nbytes)
