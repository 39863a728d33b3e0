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
from hicache.transfer.streams import Event, Streams

logger = logging.getLogger(__name__)

_MAX_LAYER_GROUPS = 8
"""Of a load whose copies keep up with the computation, one group's time is not hidden."""

_GROUP_NBYTES = 512 << 10
"""Least bytes of a page that are a copy of their own: a copy costs microseconds to launch, in
which a link of 50 GB/s moves as many times 50 KB."""

_MAX_PIECES_IN_FLIGHT = 512
"""A stream takes about 1,000 launches; the next one blocks the thread."""

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
    """Copies in two streams of their own; completions are polled, never waited for.

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
    ) -> None:
        assert device.layout == host.layout
        layout = device.layout
        self.num_layer_groups = num_layer_groups or count_layer_groups(layout)
        self.num_dropped = 0
        """Back-ups that found the queue full."""
        layers = _layer_groups(layout.num_layers, self.num_layer_groups)
        self._group_of = [
            group for group, (first, end) in enumerate(layers) for _ in range(first, end)
        ]
        layer_nbytes = layout.page_nbytes // layout.num_layers
        self._groups = [slice(first * layer_nbytes, end * layer_nbytes) for first, end in layers]
        self._page = slice(0, layout.page_nbytes)
        self._device = _bytes(device.pages, layout)
        self._host = _bytes(host.pages, layout)
        self._chunk_pages = host.chunk_pages
        self._streams = streams
        self._loads = Lane(streams, _MAX_PIECES_IN_FLIGHT)
        self._back_ups = Lane(streams, _MAX_PIECES_IN_FLIGHT)
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
        self._load(op, _Way(self._host, self._device, found, self._groups), len(source))

    def copy_page(self, op: OpId, source_tier: Tier, source: int, target: int) -> None:
        """Put the copy of a page into the stream of loads."""
        assert source_tier != "storage"
        origin = self._device if source_tier == "device" else self._host
        self._load(op, _Way(origin, self._device, [Run(source, target, 1)], [self._page]), 1)

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

    def wait(self, op: OpId, layer: int) -> None:
        """Let the current stream wait until this layer of a load has arrived."""
        assert 0 <= layer < len(self._group_of)
        copy = self._by_op.get(op)
        if copy is None:
            return
        event = self._loads.arrival(copy, self._group_of[layer])
        if event is not None:
            self._streams.current().wait_event(event)

    def fence(self) -> None:
        """Let copies asked for from now on start behind the current stream as it is now."""
        self._fence = self._streams.current().record_event()

    def drain(self) -> list[Finished]:
        """Return what has passed since the last call; put what waits into its stream."""
        finished, self._over = self._over, []
        for lane in (self._loads, self._back_ups):
            for copy, outcome in lane.over():
                self._by_op.pop(copy.op, None)
                finished.append(self._finished(copy, outcome))
            lane.advance()
        return finished

    def close(self) -> None:
        """Wait for every copy that was asked for."""
        self._is_closed = True
        self._loads.finish()
        self._back_ups.finish()

    # ------------------------------------------------------------ into the streams

    def _load(self, op: OpId, way: _Way, num_pages: int) -> None:
        self._assert_open()
        assert op not in self._by_op
        copy = self._ask(self._loads, op, way, num_pages)
        if copy is not None:
            self._by_op[op] = copy

    def _ask(self, lane: Lane, op: OpId, way: _Way, num_pages: int) -> Copy | None:
        """Give a copy to a lane, behind all that was computed so far."""
        try:
            behind = self._computed_so_far()
        except RuntimeError:
            logger.exception("the GPU failed; %d pages are not copied", num_pages)
            self._over.append(Finished(op, [False] * num_pages))
            return None
        copy = Copy(op, num_pages, len(way.groups), behind, self._parts(way))
        lane.ask(copy)
        return copy

    def _parts(self, way: _Way) -> Iterator[Part]:
        """Yield the copies of each layer group: one a run, and not too many together."""
        chosen = way.chosen
        for group in way.groups:
            for start in range(0, len(chosen), _PART_PIECES):
                some = chosen[start : start + _PART_PIECES]
                put = partial(self._streams.copy, way.target, way.source, some, group)
                yield Part(len(some), put, ends_group=start + _PART_PIECES >= len(chosen))

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
