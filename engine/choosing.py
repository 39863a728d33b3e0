"""Choosing the next tokens beside other work of the host: begun with a forward, asked for later."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from hicache.engine.device_sampling import pick
from hicache.engine.placing import Arriving, Mark, fetch, mark, place
from hicache.engine.sampling import Sampler, choose


class Choice(Protocol):
    """Tokens that are being chosen."""

    def wait(self) -> list[int]:
        """Block until they are, and the forward is over that they come from; return them."""
        ...


def begin_choosing(logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler]) -> Choice:
    """Begin to choose a token from each of these rows of a forward's logits.

    On a GPU nothing here waits for it. What a sampler drew is for the caller to ``use``.
    """
    if not rows:
        return _Nothing(mark(logits.device))
    if len(rows) < len(logits):
        logits = logits.index_select(0, place(np.array(rows, dtype=np.int64), logits.device))
    if logits.is_cuda:
        return _Fetching(fetch(pick(logits, samplers)))
    return _Chosen(choose(logits, samplers))


class _Nothing:
    def __init__(self, computed: Mark) -> None:
        self._computed = computed

    def wait(self) -> list[int]:
        self._computed.wait()
        return []


class _Fetching:
    def __init__(self, tokens: Arriving) -> None:
        self._tokens = tokens

    def wait(self) -> list[int]:
        tokens: list[int] = self._tokens.wait().tolist()
        return tokens


class _Chosen:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def wait(self) -> list[int]:
        return self._tokens
