"""Rows of bytes that lie together, each to a page of its own: one kernel for all of them.

Written in Triton, which is imported with this module and only then; ``scatter_with_torch`` is the
same without it.

Shapes: ``P`` rows, ``N`` pages of the pool, ``B`` bytes of a page.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

triton = importlib.import_module("triton")
tl = importlib.import_module("triton.language")

_WORDS = ((8, torch.int64), (4, torch.int32), (1, torch.uint8))
_BLOCK = 1024


def scatter(target: Tensor, rows: Tensor, slots: Tensor, first: int) -> None:
    """Copy ``rows [P, w]`` to bytes ``first`` to ``first + w`` of ``target [N, B]``'s ``slots``.

    ``rows`` and ``target`` are uint8 and contiguous, ``slots`` int32 ``[P]``, without duplicates,
    all on one device; it is put into the current stream.
    """
    num_rows, width = rows.shape
    nbytes, dtype = next(word for word in _WORDS if not (first | width | target.shape[1]) % word[0])
    grid = (num_rows, -(-width // (nbytes * _BLOCK)))
    _kernel[grid](
        target.view(dtype),
        rows.view(dtype),
        slots,
        first // nbytes,
        target.shape[1] // nbytes,
        width // nbytes,
        BLOCK=_BLOCK,
    )


class constexpr(int):
    """What is compiled in. Triton tells it by the name of its type."""


def _scatter(
    target: Any, rows: Any, slots: Any, first: Any, pitch: Any, width: Any, BLOCK: constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)  # times the pitch it is more than 32 bits hold
    is_inside = column < width
    words = tl.load(rows + row * width + column, mask=is_inside)
    tl.store(target + slot * pitch + first + column, words, mask=is_inside)


# Numbers that come in many values are not compiled in: a step must not wait for a compiler.
_kernel = triton.jit(_scatter, do_not_specialize=["first", "pitch", "width"])
