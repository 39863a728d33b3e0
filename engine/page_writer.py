"""Writes the new tokens' keys and values into their pages, layer by layer.

In torch, for every attention: two small copies a layer, which a CUDA graph can hold.

Shapes: ``N`` pages of the pool, ``L`` layers, ``S`` tokens a page, ``H`` key-value heads, ``D``
head size, ``T`` new tokens.
"""

import torch
from torch import Tensor


class PageWriter:
    """Where the new tokens of one forward go. Each row of a layer is written by one token."""

    def __init__(self, pages: Tensor, rows: Tensor, sources: Tensor | None = None) -> None:
        """``pages`` is the pool, ``[N, L, 2, S, H, D]``; ``rows`` as ``written_rows``, placed.

        ``sources``, where given, is ``[T]``: which token's values each row takes. Rows that are
        there twice take the same token's, so that it is all one which of them is written last.
        """
        _, _, _, self._page_size, num_heads, head_dim = pages.shape
        self._tokens = raw(pages).view(-1, num_heads, head_dim)
        self._dtype = pages.dtype
        self._rows = rows
        self._sources = sources

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write ``key`` and ``value``, both ``[H, T, D]``, of one layer."""
        first = 2 * layer * self._page_size
        for offset, new in ((first, key), (first + self._page_size, value)):
            values = stored(new.transpose(0, 1), self._dtype)
            if self._sources is not None:
                values = values.index_select(0, self._sources)
            self._tokens[offset:].index_copy_(0, self._rows, values)


def raw(pages: Tensor) -> Tensor:
    """Return the same memory in a dtype that copies by index know: bytes, for 8-bit floats."""
    return pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values as pages keep them, as ``raw`` sees them.

    What an 8-bit float cannot hold becomes the largest that it can: the conversion alone would
    make it no number at all.
    """
    if dtype.itemsize > 1:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).view(torch.uint8)
