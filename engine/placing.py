"""Small arrays to the device and results back, without the host waiting for the device.

A copy from memory that is not pinned may wait until the GPU has done all that it was given, and
so may anything that makes a tensor on the GPU out of a list. So what a forward needs goes through
pinned memory, which torch keeps and does not use again before the copy out of it is over.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Numbers = np.ndarray[tuple[int, ...], np.dtype[Any]]


def place(numbers: Numbers, device: torch.device) -> Tensor:
    """Return the numbers as a tensor on the device; in stream order, if it is a GPU."""
    return place_tensor(torch.from_numpy(numbers), device)


def place_tensor(values: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor's values on the device; in stream order, if it is a GPU."""
    if device.type == "cpu":
        return values
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy that a GPU can read beside the host; without a GPU the tensor itself."""
    return values.pin_memory() if device.type == "cuda" else values


class Mark(Protocol):
    """A point in what the device was given."""

    def wait(self) -> None:
        """Block until the device has passed it."""
        ...


def mark(device: torch.device) -> Mark:
    """Return a point behind all that the current stream of the device was given so far."""
    return _Event(device) if device.type == "cuda" else _Passed()


class Arriving(Protocol):
    """Values on their way from the device to the host."""

    def wait(self) -> Tensor:
        """Block until they are there; return them, on the CPU."""
        ...


def fetch(values: Tensor) -> Arriving:
    """Start copying values to the host, behind all that their stream was given so far.

    When they are there, all of that is over, too.
    """
    return _Fetched(values) if values.is_cuda else _There(values)


class _There:
    def __init__(self, values: Tensor) -> None:
        self._values = values

    def wait(self) -> Tensor:
        return self._values


class _Fetched:
    def __init__(self, values: Tensor) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._arrived = _Event(values.device)

    def wait(self) -> Tensor:
        self._arrived.wait()
        return self._host


class _Passed:
    def wait(self) -> None:
        pass


class _Event:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self._event.synchronize()
