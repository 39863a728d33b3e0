"""The seam to HF models: the function that they call for attention, and what it needs to know.

A forward is one row of tokens, ``[1, T]``: the new tokens of several sequences, one after the
other. HF computes queries, keys and values, with positions applied, and hands them over layer by
layer; it keeps no cache and makes no mask. Whoever attends comes along with the forward, as the
argument ``paged``.

``TorchBackend`` (paged.py) and ``FlashInferBackend`` (attention_flashinfer.py) are what there is
behind the protocols here; attention_choice.py says which.

Shapes: ``H`` key-value heads, ``G`` query heads for each of them, ``D`` head size, ``T`` tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "hicache_paged"
"""Under which HF finds our attention. It has no mask function, so HF makes no masks."""


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
class Traits:
    """What distinguishes the attention of one layer."""

    scaling: float
    window: int | None = None
    """A token sees itself and ``window - 1`` before it; ``None``: all before it."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """``[H * G]``: one more logit a head, which takes weight and gives no value."""


class Attention(Protocol):
    """What one forward does for attention."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: Traits
    ) -> Tensor:
        """Return ``[T, H * G, D]`` of ``query [H * G, T, D]``, ``key`` and ``value [H, T, D]``."""
        ...


class AttentionBackend(Protocol):
    """Attends over the pages of one pool, forward after forward. One thread."""

    @property
    def name(self) -> str:
        """What ``engine.attention`` calls it."""
        ...

    def begin(self, spans: Sequence[Span], wait: Callable[[int], None]) -> Attention:
        """Return what attends in one forward over these sequences, before the next ``begin``.

        No page is written by two of them. ``wait(layer)`` is called before a layer touches any
        page: not only before it reads, since a copy that is still arriving may also be headed
        for a page that this forward writes to (the first tokens of a page, copied for a partial
        hit, arrive as a whole page).
        """
        ...


def never_wait(layer: int) -> None:
    """Wait for nothing: what is read is in L1 already."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Attention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend as ``paged`` says. The signature is HF's; ``query`` is ``[1, H * G, T, D]``."""
    if attention_mask is not None or position_bias is not None:
        raise NotImplementedError("attention with a mask or a position bias of the model's own")
    layer = module.layer_idx
    assert isinstance(layer, int)
    traits = Traits(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return paged.attend(layer, query[0], key[0], value[0], traits).unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
