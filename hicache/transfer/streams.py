"""The little of CUDA that copies need, so that tests can stand in for a GPU.

Order, as CUDA has it: what one stream is given runs in the order given; streams run at any speed
relative to each other, except that a stream that waits for an event goes on only after all that
the other had been given when the event was recorded.
"""

import ctypes
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hicache.transfer.runs import Run
from hicache.transfer.staging import Stretch, best_scatter

logger = logging.getLogger(__name__)


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Return whether the stream has passed it. Raises ``RuntimeError`` if the GPU failed."""
        ...


class Stream(Protocol):
    """A queue of work for the GPU."""

    def wait_event(self, event: Event) -> None:
        """Hold back what this stream is given from now on until the event has passed."""
        ...

    def record_event(self) -> Event:
        """Return an event behind all that this stream has been given so far."""
        ...

    def synchronize(self) -> None:
        """Block until the stream has done all that it has been given."""
        ...


class Streams(Protocol):
    """Where streams come from and how copies are put into them."""

    def current(self) -> Stream:
        """Return the stream that this thread computes in now."""
        ...

    def stream(self) -> Stream:
        """Return a new stream."""
        ...

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Put copies into this stream meanwhile."""
        ...

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Return how long a stream took from one event to a later one; both have been passed."""
        ...

    @property
    def copies_rows(self) -> bool:
        """Whether the same part of several neighbouring pages is one copy; else it is one each."""
        ...

    def copy(self, target: Tensor, source: Tensor, chosen: Sequence[Run], part: slice) -> None:
        """Put copies of the same part of pages into the stream in use, one a run.

        Pools are bytes, ``[N, page_nbytes]``; ``part`` is a range of a page's bytes. Raises
        ``RuntimeError`` if a copy cannot be put there; those before it may have been.
        """
        ...

    def copy_stretch(
        self, target: Tensor, source: Tensor, stretch: Stretch, part: slice, buffer: Tensor
    ) -> None:
        """Put the same part of host neighbours into the stream in use, by way of a buffer.

        ``buffer`` is bytes of the device, enough for all of them, and used in one stream only.
        """
        ...


class CudaStreams:
    """Streams of one GPU.

    Tensors need no ``record_stream``: that is for memory which the allocator of torch may give
    away while a stream still reads it, and pools are never freed before the streams are idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = load_runtime()

    def current(self) -> Stream:
        """Return the stream that this thread computes in now."""
        return _CudaStream(torch.cuda.current_stream(self._device))

    def stream(self) -> Stream:
        """Return a new stream."""
        return _CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Put copies into this stream meanwhile."""
        assert isinstance(stream, _CudaStream)
        return torch.cuda.stream(stream.raw)

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Return how long a stream took from one event to a later one; both have been passed."""
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1e3

    @property
    def copies_rows(self) -> bool:
        """Whether the runtime's own copies can be called; those of torch need one stretch."""
        return self._runtime is not None

    def copy(self, target: Tensor, source: Tensor, chosen: Sequence[Run], part: slice) -> None:
        """Put copies into the stream in use; they do not block where host memory is pinned."""
        if self._runtime is None:
            copy_with_torch(target, source, chosen, part)
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._runtime.copy(target, source, chosen, part, stream)

    def copy_stretch(
        self, target: Tensor, source: Tensor, stretch: Stretch, part: slice, buffer: Tensor
    ) -> None:
        """Put a copy and a kernel into the stream in use."""
        assert self._runtime is not None
        num_pages, width = len(stretch.targets), part.stop - part.start
        rows = buffer[: num_pages * width].view(num_pages, width)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._runtime.copy_packed(rows, source, stretch.source, part, stream)
        # Torch keeps the pinned memory until the stream has read it.
        slots = torch.tensor(stretch.targets, dtype=torch.int32).pin_memory()
        best_scatter()(target, rows, slots.to(self._device, non_blocking=True), part.start)


def copy_with_torch(target: Tensor, source: Tensor, chosen: Sequence[Run], part: slice) -> None:
    """Copy a part of pages: whole pages a run at once, else page by page.

    What is not one stretch torch would copy by way of memory that is not pinned.
    """
    is_whole = part == slice(0, target.shape[1])
    for from_slot, to_slot, length in chosen:
        if is_whole:
            pages = source[from_slot : from_slot + length]
            target[to_slot : to_slot + length].copy_(pages, non_blocking=True)
        else:
            for page in range(length):
                row = source[from_slot + page, part]
                target[to_slot + page, part].copy_(row, non_blocking=True)


class Library(Protocol):
    """The functions of libcudart that are used."""

    @property
    def cudaMemcpyAsync(self) -> Any: ...
    @property
    def cudaMemcpy2DAsync(self) -> Any: ...
    @property
    def cudaGetLastError(self) -> Any: ...


class Runtime:
    """Copies of the CUDA runtime: of rows that are apart, without tensors of each."""

    def __init__(self, library: Library) -> None:
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._copy = library.cudaMemcpyAsync
        self._copy.argtypes = [address, address, size, number, address]
        self._copy.restype = number
        self._copy_rows = library.cudaMemcpy2DAsync
        self._copy_rows.argtypes = [address, size, address, size, size, size, number, address]
        self._copy_rows.restype = number
        self._last_error = library.cudaGetLastError
        self._last_error.argtypes = []
        self._last_error.restype = number

    def copy(
        self, target: Tensor, source: Tensor, chosen: Sequence[Run], part: slice, stream: int
    ) -> None:
        """Put copies into a stream. The device that it belongs to must be the current one."""
        pitch = target.shape[1]
        width = part.stop - part.start
        kind = 2 * source.is_cuda + target.is_cuda  # 1 to the device, 2 from it, 3 within it
        to_first, from_first = target.data_ptr() + part.start, source.data_ptr() + part.start
        for from_slot, to_slot, length in chosen:
            to, origin = to_first + to_slot * pitch, from_first + from_slot * pitch
            if width == pitch:
                code = self._copy(to, origin, length * pitch, kind, stream)
            else:
                code = self._copy_rows(to, pitch, origin, pitch, width, length, kind, stream)
            self._check(code)

    def copy_packed(
        self, rows: Tensor, source: Tensor, first: int, part: slice, stream: int
    ) -> None:
        """Put a part of neighbouring pages, from slot ``first`` on, together into ``rows``."""
        num_pages, width = rows.shape
        pitch = source.shape[1]
        origin = source.data_ptr() + first * pitch + part.start
        kind = 2 * source.is_cuda + rows.is_cuda
        self._check(
            self._copy_rows(rows.data_ptr(), width, origin, pitch, width, num_pages, kind, stream)
        )

    def _check(self, code: int) -> None:
        if code:
            self._last_error()  # else torch would raise it at its next launch
            raise RuntimeError(f"the CUDA runtime refused a copy: error {code}")


def load_runtime() -> Runtime | None:
    """Return the runtime that torch uses; ``None`` where it is not to be had as a library."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        return Runtime(cast(Library, ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")))
    except (OSError, AttributeError) as error:
        logger.info("pages are copied one by one, by torch: %s", error)
        return None


class _CudaStream:
    """A stream of torch, seen as ours."""

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.raw.wait_event(event)

    def record_event(self) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.raw.record_event(event)
        return event

    def synchronize(self) -> None:
        self.raw.synchronize()
