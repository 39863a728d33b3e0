"""Forwards of a model over sequences whose keys and values are in pages of a pool."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hicache.engine.attention import Attention, AttentionBackend, Span, never_wait
from hicache.engine.attention_choice import open_attention
from hicache.engine.attention_flashinfer import FlashInferBackend
from hicache.engine.graphs import DecodeGraphs, Limits, Record
from hicache.engine.model import LoadedModel
from hicache.engine.placing import place


@dataclass(slots=True)
class SequenceSlice:
    """The next tokens of one sequence."""

    token_ids: Sequence[int]
    """New tokens, at least one. All before them are in the pages."""
    start: int
    """Position of the first new token."""
    slots: "array[int]"
    """L1 slots of the sequence's pages, in order, up to the last new token's at least."""


@dataclass(slots=True)
class Batch:
    """What one forward computes. No page is written by two sequences."""

    sequences: Sequence[SequenceSlice]
    wait: Callable[[int], None] = never_wait
    """Called with a layer before anything of that layer is read or written."""


class ModelRunner:
    """Runs one model on one pool. Not thread-safe: one forward at a time."""

    def __init__(
        self, loaded: LoadedModel, pages: Tensor, attention: AttentionBackend | None = None
    ) -> None:
        """``pages`` is the pool, ``[N, L, 2, S, H, D]``; it stays the caller's.

        ``attention`` is over the same pool; without it, what the model was loaded for.
        """
        assert pages.is_contiguous()
        self._model = loaded.model
        self._pages = pages
        self._context_tokens = loaded.context_tokens
        self.attention = attention or open_attention(loaded.attention, pages, loaded.dtype)
        self.graphs: DecodeGraphs | None = None
        """What replays decode batches, where that was asked for and can be."""

    @torch.inference_mode()
    def use_graphs(self, max_batch: int, record: Record | None = None) -> None:
        """Replay decode batches from now on, if the attention can be recorded.

        Only while no page of L1 is in use: the first one is written.
        """
        if not isinstance(self.attention, FlashInferBackend):
            return
        num_pages, num_layers, _, page_size, _, _ = self._pages.shape
        longest = min(num_pages, -(-self._context_tokens // page_size))
        limits = Limits(self._pages.device, num_layers, max_batch, longest)
        self.graphs = DecodeGraphs(self.attention, self._compute, limits, record)
        self.graphs.warm_up()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Return logits of each sequence's last token, float32 ``[sequences, vocabulary]``.

        Afterwards the new tokens' keys and values are in the pages. On a GPU all that is so in
        the order of the current stream: this returns before it is computed, and waits for nothing.
        """
        spans = [self._span(sequence) for sequence in batch.sequences]
        token_ids = np.concatenate(
            [np.asarray(sequence.token_ids, dtype=np.int64) for sequence in batch.sequences]
        )
        positions = np.concatenate(
            [np.arange(span.start, span.start + span.num_tokens, dtype=np.int64) for span in spans]
        )
        if self.graphs is not None:
            logits = self.graphs.forward(spans, token_ids, positions, batch.wait)
            if logits is not None:
                return logits
        last = np.cumsum([span.num_tokens for span in spans], dtype=np.int64) - 1
        device = self._pages.device
        return self._compute(
            place(token_ids, device)[None],
            place(positions, device)[None],
            self.attention.begin(spans, batch.wait),
            place(last, device),
        )

    def _compute(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor | int = 0
    ) -> Tensor:
        """Return logits of these rows, or of all."""
        output = self._model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=rows,  # of HF's own, 0 keeps all
            paged=attention,
        )
        logits: Tensor = output.logits[0]
        return logits.float()

    def _span(self, sequence: SequenceSlice) -> Span:
        num_tokens = len(sequence.token_ids)
        assert num_tokens > 0
        assert (sequence.start + num_tokens) <= len(sequence.slots) * self._pages.shape[3]
        return Span(num_tokens, sequence.start, np.array(sequence.slots, dtype=np.int64))
