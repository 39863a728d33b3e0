"""Attention as it is written down: in float32, one sequence after the other, no tricks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hicache.engine.attention import Span, Traits


def attend(layer: Tensor, spans: Sequence[Span], query: Tensor, traits: Traits) -> Tensor:
    """Return float32 ``[T, heads, D]`` of ``query [heads, T, D]`` over one layer of a pool.

    ``layer`` is ``[N, 2, S, H, D]``, with the new tokens in it.
    """
    results: list[Tensor] = []
    first = 0
    for span in spans:
        end = span.start + span.num_tokens
        rows = query[:, first : first + span.num_tokens].float()
        slots = torch.from_numpy(span.slots).to(layer.device)
        keys, values = (
            layer[slots, part].flatten(0, 1)[:end].float().transpose(0, 1) for part in (0, 1)
        )
        results.append(_one(rows, keys, values, span.start, traits))
        first += span.num_tokens
    return torch.cat(results)


def _one(rows: Tensor, keys: Tensor, values: Tensor, start: int, traits: Traits) -> Tensor:
    """Return ``[t, heads, D]`` of ``rows [heads, t, D]``, ``keys`` and ``values [H, P, D]``."""
    shared = rows.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
    scores = rows @ keys.transpose(1, 2) * traits.scaling
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    own = torch.arange(start, start + rows.shape[1], device=rows.device)[:, None]
    seen = torch.arange(keys.shape[1], device=rows.device)[None, :]
    hidden = seen > own
    if traits.window is not None:
        hidden = hidden | (seen <= own - traits.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if traits.sinks is not None:
        sinks = traits.sinks.float()[:, None, None].expand(-1, rows.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return (weights @ values).transpose(0, 1)
