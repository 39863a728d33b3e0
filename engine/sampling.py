"""The next token of each request, from its row of logits.

A request draws from a generator of its own, one number a token, and nothing else of the batch
enters: the same seed and the same logits give the same token, whoever else is in the batch.
"""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from hicache.engine.outputs import SamplingParams

_SHORTLIST = 1024
"""Tokens that top_p looks at before it sorts the whole vocabulary."""


class Sampler:
    """How one request chooses; keeps its place in its generator when the request is preempted."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        # Python's own: cheap to make, the same everywhere, and 53 bits a draw.
        self._random = random.Random(params.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken, and nothing drawn."""
        return self.params.temperature <= 0 or self.params.top_k == 1

    def draw(self) -> float:
        """Return the next number, at least 0 and below 1."""
        return self._random.random()


@torch.inference_mode()
def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return one token for each row of ``logits``, float32 ``[sequences, vocabulary]``.

    Of equal logits greedy takes the lowest token. -1 where a row is not a number anywhere: the
    model overflowed, and there is no next token.
    """
    assert len(logits) == len(samplers)
    best, greedy = logits.max(dim=-1)
    tokens: list[int] = greedy.tolist()
    if not all(sampler.is_greedy for sampler in samplers):
        logits = logits.cpu()  # once for all: choosing asks for many single numbers
    for row, (top, sampler) in enumerate(zip(best.tolist(), samplers, strict=True)):
        if not math.isfinite(top):
            tokens[row] = -1
        elif not sampler.is_greedy:
            tokens[row] = _choose(logits[row], sampler)
    return tokens


def _choose(logits: Tensor, sampler: Sampler) -> int:
    """Draw one token: temperature, then top_k, then top_p of what is left."""
    params = sampler.params
    point = sampler.draw()
    vocabulary = logits.shape[0]
    # In float64: a sum over a vocabulary in float32 is off by more than a rare token has.
    logits = (logits.double() - logits.max()) / params.temperature
    if 0 < params.top_k < vocabulary:
        logits, ids = logits.topk(params.top_k)
        return int(ids[_place(_nucleus(logits.exp(), params.top_p), point)])
    weights = logits.exp()
    if params.top_p >= 1:
        return _place(weights, point)
    total = float(weights.sum())
    first, ids = weights.topk(min(_SHORTLIST, vocabulary))
    if float(first.sum()) < params.top_p * total:
        first, ids = weights.sort(descending=True, stable=True)
    return int(ids[_place(_nucleus(first, params.top_p, total), point)])


def _nucleus(weights: Tensor, top_p: float, total: float | None = None) -> Tensor:
    """Return the fewest weights, largest first, that are ``top_p`` of all; at least one."""
    if top_p >= 1:
        return weights
    sums = weights.cumsum(0)
    wanted = top_p * (float(sums[-1]) if total is None else total)
    num_kept = int(torch.searchsorted(sums, wanted)) + 1
    return weights[:num_kept]


def _place(weights: Tensor, point: float) -> int:
    """Return the index whose share of the weights contains ``point``; never one of weight 0."""
    sums = weights.cumsum(0)
    index = int(torch.searchsorted(sums, point * float(sums[-1]), right=True))
    # Rounding can push the point onto the total.
    return min(index, int(torch.searchsorted(sums, float(sums[-1]))))
