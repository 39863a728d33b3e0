"""The batch that is run before L1 is sized."""

import pytest
import torch

from hicache.config import EngineConfig
from hicache.engine.largest_batch import run_largest_batch
from hicache.engine.model import LoadedModel
from hicache.engine.runner import Batch, ModelRunner
from hicache.errors import ConfigError


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Batches that were run."""
    seen: list[Batch] = []
    forward = ModelRunner.forward

    def watched(self: ModelRunner, batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", watched)
    return seen


@pytest.mark.parametrize(("chunk_tokens", "max_batch"), [(24, 4), (2, 8), (1000, 1), (1, 1)])
def test_as_many_tokens_and_sequences_run_as_ever_will(
    chunk_tokens: int, max_batch: int, forwards: list[Batch], llama: LoadedModel
) -> None:
    config = EngineConfig(chunk_tokens=chunk_tokens, max_batch=max_batch)

    run_largest_batch(llama, config, 8)

    (batch,) = forwards
    longest = max(each.start + len(each.token_ids) for each in batch.sequences)
    assert longest == llama.context_tokens
    assert len(batch.sequences) == min(max_batch, chunk_tokens)
    num_tokens = sum(len(each.token_ids) for each in batch.sequences)
    assert num_tokens == min(chunk_tokens, llama.context_tokens)


def test_a_device_without_room_for_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, llama: LoadedModel
) -> None:
    def forward(self: ModelRunner, batch: Batch) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")

    monkeypatch.setattr(ModelRunner, "forward", forward)

    with pytest.raises(ConfigError, match=r"lower engine\.chunk_tokens or engine\.context_tokens"):
        run_largest_batch(llama, EngineConfig(), 8)
