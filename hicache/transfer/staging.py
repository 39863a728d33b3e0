"""Pages that are neighbours on the host and apart on the device: one copy, then one kernel.

Small pages cost as much to launch as to move. Where a stretch of host memory goes to scattered
slots, it goes to a buffer on the device first, in one copy, and from there a kernel writes each
page where it belongs. All that uses the buffer is in one stream, whose order keeps a copy from
overtaking the kernel before it.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hicache.transfer.runs import Run

logger = logging.getLogger(__name__)

_SHORT_NBYTES = 256 << 10
"""Runs shorter than this, on average, are worth the second way through device memory."""

_LEAST_RUNS = 4
"""Below this the launches saved are those of the detour."""


class Stretch(NamedTuple):
    """Pages that are neighbours on the host, from slot ``source`` on."""

    source: int
    targets: Sequence[int]
    """The device slot of each."""


def stretches(
    chosen: Sequence[Run], width: int, buffer_nbytes: int, source_chunk: int
) -> Iterator[Run | Stretch]:
    """Yield runs as they are, or several as one stretch where that is worth it, in order.

    ``width`` bytes of each page are copied. A stretch fits the buffer, and crosses no multiple of
    ``source_chunk`` host slots; 0 is a pool in one piece.
    """
    most = buffer_nbytes // width
    together: list[Run] = []
    num_pages = 0
    for run in chosen:
        follows = bool(together) and run.source == together[-1].source + together[-1].length
        is_cut = bool(source_chunk) and run.source % source_chunk == 0
        if together and (not follows or is_cut or num_pages + run.length > most):
            yield from _joined(together, num_pages, width)
            together, num_pages = [], 0
        together.append(run)
        num_pages += run.length
    if together:
        yield from _joined(together, num_pages, width)


def _joined(together: Sequence[Run], num_pages: int, width: int) -> Iterator[Run | Stretch]:
    is_short = num_pages * width < _SHORT_NBYTES * len(together)
    if len(together) < _LEAST_RUNS or not is_short:
        yield from together
        return
    targets = [run.target + page for run in together for page in range(run.length)]
    yield Stretch(together[0].source, targets)


Scatter = Callable[[Tensor, Tensor, Tensor, int], None]


def scatter_with_torch(target: Tensor, rows: Tensor, slots: Tensor, first: int) -> None:
    """Copy ``rows [P, w]`` to bytes ``first`` to ``first + w`` of ``target [N, B]``'s ``slots``."""
    target[:, first : first + rows.shape[1]].index_copy_(0, slots.long(), rows)


def warm_up(device: torch.device) -> None:
    """Have the kernel compiled now, and not when a step waits for it."""
    pages, rows = torch.zeros(2, 2, 16, dtype=torch.uint8, device=device)
    slots = torch.arange(2, dtype=torch.int32, device=device)
    best_scatter()(pages, rows, slots, 0)


@cache
def best_scatter() -> Scatter:
    """Return Triton's kernel, or torch's where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        logger.info("pages are scattered by torch: triton is not installed")
        return scatter_with_torch
    return cast(Scatter, importlib.import_module("hicache.transfer.scatter").scatter)
