"""Forwards of a model over sequences whose keys and values are in pages of a pool."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hicache.engine.attention import AttentionBackend, Span, never_wait
from hicache.engine.attention_choice import open_attention
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
        self.attention = attention or open_attention(loaded.attention, pages, loaded.dtype)

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
        last = np.cumsum([span.num_tokens for span in spans], dtype=np.int64) - 1
        device = self._pages.device
        output = self._model(
            input_ids=place(token_ids, device)[None],
            position_ids=place(positions, device)[None],
            use_cache=False,
            logits_to_keep=place(last, device),
            paged=self.attention.begin(spans, batch.wait),
        )
        logits: Tensor = output.logits[0]
        return logits.float()

    def _span(self, sequence: SequenceSlice) -> Span:
        num_tokens = len(sequence.token_ids)
        assert num_tokens > 0
        assert (sequence.start + num_tokens) <= len(sequence.slots) * self._pages.shape[3]
        return Span(num_tokens, sequence.start, np.array(sequence.slots, dtype=np.int64))
