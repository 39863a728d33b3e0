"""Which pages the sequences of a forward read, and where their new tokens go: index arrays.

NumPy only, on the host. Attention kernels read pages as rows of ragged arrays: the pages of
sequence ``i`` are ``indices[indptr[i]:indptr[i + 1]]``, and its queries are the rows
``query_indptr[i]`` to ``query_indptr[i + 1]``.

Shapes: ``n`` sequences, ``P`` pages of all of them, ``T`` new tokens of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from hicache.engine.attention import Indices, Span

SmallIndices = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class PageTable:
    """What one forward reads, in the form that kernels take."""

    query_indptr: SmallIndices
    """``[n + 1]``: where each sequence's new tokens begin in the row; then ``T``."""
    indptr: SmallIndices
    """``[n + 1]``: where each sequence's pages begin in ``indices``; then ``P``."""
    indices: SmallIndices
    """``[P]``: slots."""
    last_page_len: SmallIndices
    """``[n]``: tokens in the last page of each sequence, new ones included; 1 to page size."""

    @property
    def num_sequences(self) -> int:
        """``n``."""
        return len(self.last_page_len)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return int(self.query_indptr[-1]) == self.num_sequences


def page_table(spans: Sequence[Span], page_size: int) -> PageTable:
    """Return the page table of a forward. Slots beyond a sequence's last new token are left out."""
    num_new = np.array([span.num_tokens for span in spans], dtype=np.int32)
    ends = np.array([span.start + span.num_tokens for span in spans], dtype=np.int64)
    assert num_new.min() > 0
    num_pages = (-(-ends // page_size)).astype(np.int32)
    pages = [span.slots[:count] for span, count in zip(spans, num_pages, strict=True)]
    indices = np.concatenate(pages).astype(np.int32)
    table = PageTable(
        query_indptr=_indptr(num_new),
        indptr=_indptr(num_pages),
        indices=indices,
        last_page_len=((ends - 1) % page_size + 1).astype(np.int32),
    )
    assert len(indices) == table.indptr[-1]
    return table


def written_rows(spans: Sequence[Span], page_size: int, page_rows: int) -> Indices:
    """Return where the new tokens go, ``[T]``, in a pool that is seen as rows of one token.

    ``page_rows`` is the number of rows of a page. The row is that of layer 0's key.
    """
    rows: list[Indices] = []
    for span in spans:
        positions = np.arange(span.start, span.start + span.num_tokens, dtype=np.int64)
        rows.append(span.slots[positions // page_size] * page_rows + positions % page_size)
    return np.concatenate(rows)


@dataclass(frozen=True, slots=True)
class Padded:
    """The sequences of a forward, filled up to a number for which there is a CUDA graph."""

    spans: Sequence[Span]
    sources: Indices
    """For each, which of them it is: those that fill up are one of the others again."""


def padded(spans: Sequence[Span], num_sequences: int) -> Padded:
    """Return so many spans: these, and then the shortest of them again and again.

    What is computed of the copies is thrown away, and they write what the first of them writes.
    """
    num_missing = num_sequences - len(spans)
    assert num_missing >= 0
    shortest = min(range(len(spans)), key=lambda index: spans[index].start)
    return Padded(
        [*spans, *repeat(spans[shortest], num_missing)],
        np.array([*range(len(spans)), *repeat(shortest, num_missing)], dtype=np.int64),
    )


def _indptr(counts: SmallIndices) -> SmallIndices:
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
