"""The next token of each request where the logits are: on a GPU, without asking the host.

The same choice as ``sampling.sample`` makes in NumPy, up to the rounding of sums: that one is
faster on a CPU, and this one brings one number a request to the host, not its logits.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hicache.engine.placing import place
from hicache.engine.sampling import Sampler


def pick(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return one token for each row of ``logits``, float32 ``[n, vocabulary]``, as int64 ``[n]``.

    -1 where a row's best is not a number. Each sampler that is not greedy draws a number.
    """
    assert len(logits) == len(samplers)
    best, tokens = logits.max(dim=-1)
    if not all(sampler.is_greedy for sampler in samplers):
        is_greedy = np.array([sampler.is_greedy for sampler in samplers])
        tokens = torch.where(place(is_greedy, logits.device), tokens, _draw(logits, best, samplers))
    return torch.where(torch.isfinite(best), tokens, -1)


def _draw(logits: Tensor, best: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return a token drawn for every row: temperature, then top_k, then top_p of what is left."""
    size = logits.shape[1]
    numbers = np.array([_numbers(sampler, size) for sampler in samplers], dtype=np.float64)
    heat, top_k, top_p, point = place(numbers, logits.device).unsqueeze(-1).unbind(1)  # [n, 1]
    is_whole = (top_k >= size) & (top_p >= 1)  # draws in the order of tokens, others by rank
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    values = torch.where(is_whole, logits, ordered)
    rank = torch.arange(size, device=logits.device)
    # In float64: a sum over a vocabulary in float32 is off by more than a rare token has.
    weights = torch.exp((values - best.unsqueeze(-1)).double() / heat) * (rank < top_k)
    sums = weights.cumsum(-1)
    before = F.pad(sums[:, :-1], (1, 0))
    is_kept = (before < top_p * sums[:, -1:]) | (rank == 0) | (top_p >= 1)
    total = torch.where(is_kept, sums, 0.0).amax(-1, keepdim=True)
    index = (sums <= point * total).sum(-1, keepdim=True)
    # Rounding can push the point onto the total.
    index = torch.minimum(index, (sums < total).sum(-1, keepdim=True))
    return torch.where(is_whole, index, ids.gather(1, index)).squeeze(-1)


def _numbers(sampler: Sampler, size: int) -> tuple[float, float, float, float]:
    """Return temperature, top_k, top_p and the number drawn; anything for a greedy one."""
    params = sampler.params
    if sampler.is_greedy:
        return 1.0, size, 1.0, 0.0
    top_k = params.top_k if 0 < params.top_k < size else size
    return params.temperature, top_k, params.top_p, sampler.draw()
