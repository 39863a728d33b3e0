"""A forward as large as they come, before L1 is sized: what it needs must be left to it."""

from array import array

import torch

from hicache.config import EngineConfig
from hicache.engine.model import LoadedModel
from hicache.engine.runner import Batch, ModelRunner, SequenceSlice
from hicache.errors import ConfigError


def run_largest_batch(loaded: LoadedModel, config: EngineConfig, page_size: int) -> None:
    """Run it on pages of its own, so that torch keeps the memory that it took.

    A chunk at the end of the longest sequence, beside as many other sequences as may run: with
    those that share another such length. Raises ``ConfigError`` where the device has no room.
    """
    num_others = max(0, min(config.max_batch, config.chunk_tokens) - 1)
    num_new = min(config.chunk_tokens - num_others, loaded.context_tokens)
    each = max(1, loaded.context_tokens // max(1, num_others))
    lengths = [(num_new, loaded.context_tokens - num_new), *[(1, each - 1)] * num_others]
    sequences: list[SequenceSlice] = []
    num_pages = 1
    for num_tokens, start in lengths:
        # All that was computed before is read from page 0, whatever is in it.
        num_written = (start + num_tokens - 1) // page_size - start // page_size + 1
        own = range(num_pages, num_pages + num_written)
        slots = array("i", [0] * (start // page_size)) + array("i", own)
        sequences.append(SequenceSlice([0] * num_tokens, start, slots))
        num_pages += num_written
    try:
        shape = (num_pages, *loaded.layout_for(page_size).page_shape)
        dtype = loaded.kv_dtype or loaded.dtype
        pages = torch.zeros(shape, dtype=dtype, device=loaded.device)
        ModelRunner(loaded, pages).forward(Batch(sequences)).cpu()
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{loaded.device} has no room for {config.chunk_tokens} tokens at once at the end of "
            f"{loaded.context_tokens:,}: lower engine.chunk_tokens or engine.context_tokens"
        ) from None
