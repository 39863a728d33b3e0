"""Runs of a model on pages, and of HF's own on its own cache, for tests that compare them."""

import random
from array import array
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hicache.engine.model import LoadedModel
from hicache.engine.runner import Batch, ModelRunner, SequenceSlice

PAGE_SIZE = 8


class Pages:
    """A pool, a runner on it, and the slots of sequences, handed out in random order."""

    def __init__(
        self, loaded: LoadedModel, num_pages: int = 64, seed: int = 0, page_size: int = PAGE_SIZE
    ) -> None:
        layout = loaded.layout_for(page_size)
        self.page_size = page_size
        # What was in a slot before must not matter: whoever reads too far finds nonsense.
        self.pool = torch.full((num_pages, *layout.page_shape), 1e4, dtype=loaded.dtype)
        self.runner = ModelRunner(loaded, self.pool)
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def allocate(self, num_tokens: int) -> "array[int]":
        """Return slots for a sequence of so many tokens."""
        return array("i", [self._free.pop() for _ in range(-(-num_tokens // self.page_size))])

    def prefill(self, tokens: Sequence[int], cuts: Sequence[int], slots: "array[int]") -> Tensor:
        """Return the logits after the last of several forwards, which end at ``cuts``."""
        logits = torch.empty(0)
        for start, end in pairwise(cuts):
            piece = SequenceSlice(tokens[start:end], start, slots)
            logits = self.runner.forward(Batch([piece]))
        return logits[0]

    def continue_greedily(
        self,
        tokens: Sequence[int],
        cuts: Sequence[int],
        count: int,
        slots: "array[int] | None" = None,
    ) -> tuple[list[int], Tensor]:
        """Return greedy tokens, and the logits that each was chosen by.

        With ``slots``, what is in them up to the first cut is taken as it is.
        """
        slots = self.allocate(len(tokens) + count) if slots is None else slots
        rows = [self.prefill(tokens, cuts, slots)]
        chosen = [int(rows[0].argmax())]
        for position in range(len(tokens), len(tokens) + count - 1):
            piece = SequenceSlice(chosen[-1:], position, slots)
            rows.append(self.runner.forward(Batch([piece]))[0])
            chosen.append(int(rows[-1].argmax()))
        return chosen, torch.stack(rows)


@torch.inference_mode()
def own_continuation(
    model: PreTrainedModel, tokens: Sequence[int], cuts: Sequence[int], count: int
) -> tuple[list[int], Tensor]:
    """Return the same of HF's model with HF's attention and cache."""
    cache = DynamicCache(config=model.config)
    rows: list[Tensor] = []
    for start, end in pairwise(cuts):
        rows = [_own_forward(model, tokens[start:end], start, cache)]
    chosen = [int(rows[0].argmax())]
    for position in range(len(tokens), len(tokens) + count - 1):
        rows.append(_own_forward(model, chosen[-1:], position, cache))
        chosen.append(int(rows[-1].argmax()))
    return chosen, torch.stack(rows)


def _own_forward(
    model: PreTrainedModel, tokens: Sequence[int], start: int, cache: DynamicCache
) -> Tensor:
    positions = torch.arange(start, start + len(tokens))[None]
    output = model(
        input_ids=torch.tensor([list(tokens)]),
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[0, -1]
    return logits.float()
