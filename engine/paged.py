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

from hicache.engine.attention import Attention, Indices, Span, Traits
from hicache.engine.page_tables import written_rows
from hicache.engine.page_writer import PageWriter, raw
from hicache.engine.placing import place


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
    """``[2 * P, S * H * D]``, a view of a workspace, as the pool keeps them."""
    seen: Tensor
    """The same in the dtype that is computed in: the same memory, or a view of another."""
    readings: list[_Reading]


class Workspace:
    """Memory that layers gather pages into, one after the other: kept, for it is large.

    Shared by the forwards of one backend, which never overlap.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return so many elements of anything."""
        if self._buffer.numel() < num_elements or self._buffer.dtype != dtype:
            self._buffer = torch.empty(0)  # the old goes before the new is taken
            self._buffer = torch.empty(num_elements + num_elements // 4, dtype=dtype, device=device)
        return self._buffer[:num_elements]


class TorchBackend:
    """Attention in torch, on any device and in any dtype."""

    name = "torch"

    def __init__(self, pages: Tensor, dtype: torch.dtype | None = None) -> None:
        """``pages`` is the pool, ``[N, L, 2, S, H, D]``, contiguous.

        ``dtype`` is what is computed in, where the pool's is another.
        """
        assert pages.is_contiguous()
        self.pages = pages
        self.dtype = pages.dtype if dtype is None else dtype
        self.gathered = Workspace()
        self.converted = Workspace()

    def begin(self, spans: Sequence[Span], wait: Callable[[int], None]) -> Attention:
        """Return what attends in one forward over these sequences."""
        return PagedAttention(self, spans, wait)


class PagedAttention:
    """One forward's attention over the pages of a pool."""

    def __init__(
        self, backend: TorchBackend, spans: Sequence[Span], wait: Callable[[int], None]
    ) -> None:
        pages = backend.pages
        num_pages, self._num_layers, _, self._page_size, self._num_heads, self._head_dim = (
            pages.shape
        )
        self._backend = backend
        self._pages = pages
        self._spans = spans
        self._wait = wait
        self._stretches = raw(pages).view(num_pages * self._num_layers * 2, -1)
        rows = written_rows(spans, self._page_size, self._num_layers * 2 * self._page_size)
        self._writer = PageWriter(pages, place(rows, pages.device))
        self._gathers: dict[int | None, _Gather] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: Traits
    ) -> Tensor:
        """Write the new tokens of this layer into their pages, then attend over all pages."""
        self._wait(layer)
        self._writer.write(layer, key, value)
        gather = self._gathers.get(traits.window)
        if gather is None:
            gather = self._gathers[traits.window] = self._plan(traits.window)
        # Whole stretches of memory: 8 times as fast as indexing pages of a strided view.
        torch.index_select(self._stretches[2 * layer :], 0, gather.rows, out=gather.target)
        if gather.seen is not gather.target:
            gather.seen.copy_(gather.target.view(self._pages.dtype))
        rows = query.transpose(0, 1)  # [T, H * G, D]
        results = [
            _attend(rows[reading.first : reading.last], reading, traits)
            for reading in gather.readings
        ]
        return results[0] if len(results) == 1 else torch.cat(results)

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
        target, seen_values = self._memory(2 * len(rows))
        gathered = seen_values.view(2, len(rows) * size, self._num_heads, self._head_dim)
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
        placed = place(np.concatenate([rows, rows + 1]), self._pages.device)
        return _Gather(placed, target, seen_values, readings)

    def _memory(self, num_stretches: int) -> tuple[Tensor, Tensor]:
        """Return where so many stretches are gathered into, and where they are read."""
        backend, device = self._backend, self._pages.device
        num_elements = num_stretches * self._stretches.shape[1]
        target = backend.gathered.take(num_elements, self._stretches.dtype, device)
        target = target.view(num_stretches, -1)
        if self._pages.dtype == backend.dtype:
            return target, target
        seen = backend.converted.take(num_elements, backend.dtype, device)
        return target, seen.view(num_stretches, -1)

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
        mask = torch.zeros(hidden.shape, dtype=self._backend.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf")), False


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
