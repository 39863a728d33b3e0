"""The little of CUDA that copies need, so that tests can stand in for a GPU.

Order, as CUDA has it: what one stream is given runs in the order given; streams run at any speed
relative to each other, except that a stream that waits for an event goes on only after all that
the other had been given when the event was recorded.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


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

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Put copies into the stream in use, each between two contiguous tensors.

        Raises ``RuntimeError`` if one cannot be put there; those before it may have been.
        """
        ...


class CudaStreams:
    """Streams of one GPU.

    Tensors need no ``record_stream``: that is for memory which the allocator of torch may give
    away while a stream still reads it, and pools are never freed before the streams are idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

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

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Put copies into the stream in use; they do not block where host memory is pinned."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


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
