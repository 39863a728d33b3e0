"""Attention over pages of a pool, in torch.

In each layer the new tokens' keys and values are written into the sequences' pages; then every
sequence reads its own pages, old and new.

What comes out does not depend on which slots hold the pages, nor on what else is in them: pages
are gathered into one run of tokens and each sequence attends to exactly its own, so the same
values go through the same operations. (Neighbours only matter as they change ``T``, and with it
the shapes of the matrix products around attention.)

Shapes: ``N`` pages of the pool, ``L`` layers, ``S`` tokens a page, ``H`` key-value heads, ``G``
query heads for each of them, ``D`` head size, ``T`` tokens of the row, ``P`` pages read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hicache.engine.attention import Traits

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence, and where all of its tokens are."""

    num_tokens: int
    """New tokens; they follow those of the span before in the row."""
    start: int
    """Position of the first new token: so many tokens are in the pages already."""
    slots: Indices
    """Slots of its pages, in order; at least up to its last new token."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """One sequence, for all layers of one window: what it asks with, and what it may see."""

    first: int
    """Its new tokens in the row: ``first`` to ``last``."""
    last: int
    keys: Tensor
    """``[1, H, tokens, D]``, a view of the workspace: as many tokens as any of its may see."""
    values: Tensor
    mask: Tensor | None
    """``[new tokens, tokens]``, to be added; ``None``: none needed, or causal."""
    is_causal: bool


@dataclass(frozen=True, slots=True)
class _Gather:
    """What layers of one window read."""

    rows: Tensor
    """Layer 0's stretches of the pool, ``[2 * P]``: keys, then values."""
    target: Tensor
    """``[2 * P, S * H * D]``, a view of the workspace."""
    readings: list[_Reading]


class Workspace:
    """Memory that layers gather pages into, one after the other: kept, for it is large.

    Shared by the forwards of one runner, which never overlap.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, num_elements: int, like: Tensor) -> Tensor:
        """Return so many elements of anything, in ``like``'s dtype, where ``like`` is."""
        if self._buffer.numel() < num_elements or self._buffer.dtype != like.dtype:
            self._buffer = torch.empty(
                num_elements + num_elements // 4, dtype=like.dtype, device=like.device
            )
        return self._buffer[:num_elements]


class PagedAttention:
    """One forward's attention over the pages of a pool.

    ``wait(layer)`` is called before a layer touches any page: not only before it reads, since a
    copy that is still arriving may also be headed for a page that this forward writes to (the
    first tokens of a page, copied for a partial hit, arrive as a whole page).
    """

    def __init__(
        self,
        pages: Tensor,
        spans: Sequence[Span],
        wait: Callable[[int], None],
        workspace: Workspace,
    ) -> None:
        """``pages`` is the pool, ``[N, L, 2, S, H, D]``, contiguous."""
        num_pages, self._num_layers, _, self._page_size, self._num_heads, self._head_dim = (
            pages.shape
        )
        self._pages = pages
        self._spans = spans
        self._wait = wait
        self._workspace = workspace
        self._stretches = pages.view(num_pages * self._num_layers * 2, -1)
        self._tokens = pages.view(-1, self._num_heads, self._head_dim)
        self._written = self._rows_written()
        self._gathers: dict[int | None, _Gather] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: Traits
    ) -> Tensor:
        """Write the new tokens of this layer into their pages, then attend over all pages."""
        self._wait(layer)
        key_rows = self._written[layer]
        self._tokens.index_copy_(0, key_rows, key.transpose(0, 1))
        self._tokens.index_copy_(0, key_rows + self._page_size, value.transpose(0, 1))
        gather = self._gathers.get(traits.window)
        if gather is None:
            gather = self._gathers[traits.window] = self._plan(traits.window)
        # Whole stretches of memory: 8 times as fast as indexing pages of a strided view.
        torch.index_select(self._stretches, 0, gather.rows + 2 * layer, out=gather.target)
        rows = query.transpose(0, 1)  # [T, H * G, D]
        results = [
            _attend(rows[reading.first : reading.last], reading, traits)
            for reading in gather.readings
        ]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _rows_written(self) -> Tensor:
        """Return where each layer's new keys go in the pool as a list of tokens, ``[L, T]``."""
        stretch = self._page_size
        page_tokens = self._num_layers * 2 * stretch
        rows: list[Indices] = []
        for span in self._spans:
            positions = np.arange(span.start, span.start + span.num_tokens, dtype=np.int64)
            pages = span.slots[positions // stretch]
            rows.append(pages * page_tokens + positions % stretch)
        layers = np.arange(self._num_layers, dtype=np.int64)[:, None] * (2 * stretch)
        return self._index(np.concatenate(rows) + layers)

    def _plan(self, window: int | None) -> _Gather:
        """Return what layers with this window gather, and how each sequence reads it."""
        size = self._page_size
        pages: list[Indices] = []
        ranges: list[tuple[int, int]] = []  # positions from, to
        for span in self._spans:
            last = span.start + span.num_tokens
            first = 0 if window is None else max(0, span.start + 1 - window)
            pages.append(span.slots[first // size : -(-last // size)])
            ranges.append((first, last))
        rows = np.concatenate(pages) * (2 * self._num_layers)
        target = self._workspace.take(2 * len(rows) * self._stretches.shape[1], self._pages).view(
            2 * len(rows), -1
        )
        gathered = target.view(2, len(rows) * size, self._num_heads, self._head_dim)
        readings: list[_Reading] = []
        first_row = first_token = 0
        for span, (first, last), own in zip(self._spans, ranges, pages, strict=True):
            offset = first_token + first % size
            seen = gathered[:, offset : offset + last - first].transpose(1, 2).unsqueeze(1)
            mask, is_causal = self._mask(span, first, window)
            readings.append(
                _Reading(first_row, first_row + span.num_tokens, seen[0], seen[1], mask, is_causal)
            )
            first_row += span.num_tokens
            first_token += len(own) * size
        return _Gather(self._index(np.concatenate([rows, rows + 1])), target, readings)

    def _mask(self, span: Span, first: int, window: int | None) -> tuple[Tensor | None, bool]:
        last = span.start + span.num_tokens
        if span.num_tokens == 1:
            return None, False
        if span.start == 0 and (window is None or last <= window):
            return None, True
        device = self._pages.device
        own = torch.arange(span.start, last, device=device)[:, None]
        seen = torch.arange(first, last, device=device)[None, :]
        hidden = seen > own
        if window is not None:
            hidden |= seen <= own - window
        mask = torch.zeros(hidden.shape, dtype=self._pages.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf")), False

    def _index(self, rows: Indices) -> Tensor:
        return torch.from_numpy(rows).to(self._pages.device, non_blocking=True)


def _attend(rows: Tensor, reading: _Reading, traits: Traits) -> Tensor:
    """Return ``[t, H * G, D]`` of one sequence's queries, ``[t, H * G, D]``."""
    num_rows, num_query_heads, head_dim = rows.shape
    num_heads = reading.keys.shape[1]
    if traits.softcap is not None or traits.sinks is not None:
        return _attend_explicitly(rows, reading, traits)
    if num_rows == 1:
        # The heads that share keys are the rows of one product.
        packed = rows.reshape(1, num_heads, num_query_heads // num_heads, head_dim)
        result = F.scaled_dot_product_attention(
            packed, reading.keys, reading.values, scale=traits.scaling
        )
        return result.reshape(1, num_query_heads, head_dim)
    result = F.scaled_dot_product_attention(
        rows.transpose(0, 1).unsqueeze(0),
        reading.keys,
        reading.values,
        attn_mask=reading.mask,
        is_causal=reading.is_causal,
        scale=traits.scaling,
        enable_gqa=num_query_heads != num_heads,
    )
    return result[0].transpose(0, 1)


def _attend_explicitly(rows: Tensor, reading: _Reading, traits: Traits) -> Tensor:
    """Attend with every score in memory: what no fused kernel here offers."""
    num_rows, num_query_heads, head_dim = rows.shape
    num_heads = reading.keys.shape[1]
    packed = rows.transpose(0, 1).reshape(num_heads, -1, head_dim)  # [H, G * t, D]
    scores = torch.matmul(packed, reading.keys[0].transpose(1, 2)) * traits.scaling
    scores = scores.view(num_query_heads, num_rows, -1)
    if traits.softcap is not None:
        scores = torch.tanh(scores / traits.softcap) * traits.softcap
    mask = reading.mask
    if reading.is_causal:
        hidden = torch.ones(num_rows, num_rows, dtype=torch.bool, device=rows.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if traits.sinks is not None:
        sinks = traits.sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, num_rows, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(rows.dtype)
    weights = weights[..., : reading.keys.shape[2]].reshape(num_heads, -1, reading.keys.shape[2])
    result = torch.matmul(weights, reading.values[0])  # [H, G * t, D]
    return result.view(num_query_heads, num_rows, head_dim).transpose(0, 1)
