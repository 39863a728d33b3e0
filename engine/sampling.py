"""The next token of each request, from its row of logits.

A request draws from a generator of its own, one number a token, and nothing else of the batch
enters: the same seed and the same logits give the same token, whoever else is in the batch.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hicache.engine.outputs import SamplingParams

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]
Indices = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

_SHORTLIST = 1024
"""Tokens that top_p looks at before it sorts the whole vocabulary."""


class Sampler:
    """How one request chooses; keeps its place in its generator when the request is preempted."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        # Python's own: cheap to make, the same everywhere, and 53 bits a draw.
        self._random = random.Random(params.seed)
        self._number: float | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken, and nothing drawn."""
        return self.params.temperature <= 0 or self.params.top_k == 1

    def draw(self) -> float:
        """Return a number, at least 0 and below 1: the same one until it was used."""
        if self._number is None:
            self._number = self._random.random()
        return self._number

    def use(self) -> None:
        """Take note that the number chose a token: the next draw gives another."""
        self._number = None


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return what ``choose`` does; the numbers that it drew are used."""
    tokens = choose(logits, samplers)
    for sampler in samplers:
        sampler.use()
    return tokens


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return one token for each row of ``logits``, float32 ``[sequences, vocabulary]``.

    Of equal logits greedy takes the lowest token. -1 where a row's best is not a number: the
    model overflowed, and there is no next token.
    """
    assert len(logits) == len(samplers)
    best, greedy = logits.max(dim=-1)
    tokens: list[int] = greedy.tolist()
    # Drawing is done on the CPU, in NumPy: it asks for many single numbers, and sorts.
    rows = None if all(sampler.is_greedy for sampler in samplers) else logits.cpu().numpy()
    for row, (top, sampler) in enumerate(zip(best.tolist(), samplers, strict=True)):
        if not math.isfinite(top):
            tokens[row] = -1
        elif rows is not None and not sampler.is_greedy:
            tokens[row] = _choose(rows[row], sampler)
    return tokens


def _choose(logits: Numbers, sampler: Sampler) -> int:
    """Draw one token: temperature, then top_k, then top_p of what is left."""
    params, point = sampler.params, sampler.draw()
    # In float64: a sum over a vocabulary in float32 is off by more than a rare token has.
    weights = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
    if 0 < params.top_k < len(weights):
        ids = _largest(weights, params.top_k)
        return int(ids[_place(_nucleus(weights[ids], params.top_p), point)])
    if params.top_p >= 1:
        return _place(weights, point)
    total = float(weights.sum())
    count = _SHORTLIST
    while weights[ids := _largest(weights, count)].sum() < params.top_p * total:
        if count >= len(weights):
            break
        count *= 8
    return int(ids[_place(_nucleus(weights[ids], params.top_p, total), point)])


def _largest(weights: Numbers, count: int) -> Indices:
    """Return the indices of the largest weights, largest first; of equal ones the lower first."""
    if count >= len(weights):
        return np.argsort(-weights, kind="stable")
    ids = np.sort(np.argpartition(weights, -count)[-count:])
    return ids[np.argsort(-weights[ids], kind="stable")]


def _nucleus(weights: Numbers, top_p: float, total: float | None = None) -> Numbers:
    """Return the fewest weights, largest first, that are ``top_p`` of all; at least one."""
    if top_p >= 1:
        return weights
    sums = weights.cumsum()
    wanted = top_p * (float(sums[-1]) if total is None else total)
    return weights[: int(np.searchsorted(sums, wanted)) + 1]


def _place(weights: Numbers, point: float) -> int:
    """Return the index whose share of the weights contains ``point``; never one of weight 0."""
    sums = weights.cumsum()
    index = int(np.searchsorted(sums, point * sums[-1], side="right"))
    # Rounding can push the point onto the total.
    return min(index, int(np.searchsorted(sums, sums[-1])))
