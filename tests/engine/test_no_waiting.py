"""A forward never makes the host wait for a GPU, and puts every tensor on it: seen on a CPU."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hicache.engine.attention import AttentionBackend, Span, Traits, never_wait
from hicache.engine.attention_flashinfer import FlashInferBackend
from hicache.engine.paged import TorchBackend
from hicache.engine.runner import Batch, ModelRunner, SequenceSlice
from tests.engine.no_sync import NothingReadBack
from tests.engine.paged_runs import Pages
from tests.engine.tiny_models import tiny_model


class Idle:
    """In place of FlashInfer: accepts every plan, and attends to nothing."""

    def __init__(self, *arguments: object, **others: object) -> None:
        self.planned: tuple[object, ...] = ()

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> Callable[..., "Idle"]:
        return Idle

    @property
    def BatchDecodeWithPagedKVCacheWrapper(self) -> Callable[..., "Idle"]:
        return Idle

    def plan(self, *arguments: object, **others: object) -> None:
        self.planned = arguments

    def run(self, q: Tensor, cache: object, *, return_lse: bool = False) -> object:
        return (q, q[..., 0].float()) if return_lse else q


@pytest.mark.parametrize("name", ["torch", "flashinfer"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_nothing_is_read_back_in_a_forward(tmp_path: Path, kind: str, name: str) -> None:
    pages = Pages(tiny_model(tmp_path, kind))
    if name == "flashinfer":
        backend = FlashInferBackend(pages.pool, torch.float32, Idle(), 1024)
        pages.runner = ModelRunner(tiny_model(tmp_path, kind), pages.pool, backend)
    slots = [pages.allocate(40) for _ in range(3)]
    tokens = list(range(3, 43))
    mixed = Batch(
        [
            SequenceSlice(tokens[:1], 0, slots[0]),
            SequenceSlice(tokens[:20], 0, slots[1]),
            SequenceSlice(tokens[:7], 0, slots[2]),
        ]
    )
    decode = Batch([SequenceSlice(tokens[20:21], 20, own) for own in slots])

    with NothingReadBack():
        pages.runner.forward(mixed)
        logits = pages.runner.forward(decode)

    assert logits.shape[0] == 3


@pytest.mark.parametrize("window", [None, 7], ids=["all", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
def test_all_that_a_layer_computes_with_is_on_the_device(
    backend: str, dtype: torch.dtype, window: int | None
) -> None:
    """On ``meta``: tensors without values, which cannot be read, in place of a GPU's."""
    spans = [Span(1, 30, np.arange(4)), Span(9, 13, np.arange(4, 7)), Span(5, 0, np.array([7]))]
    pages = torch.empty(20, 2, 2, 8, 2, 64, dtype=dtype, device="meta")
    query = torch.empty(6, 15, 64, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(2, 15, 64, dtype=torch.bfloat16, device="meta") for _ in "kv")
    made: AttentionBackend = (
        TorchBackend(pages, torch.bfloat16)
        if backend == "torch"
        else FlashInferBackend(pages, torch.bfloat16, Idle(), 1024)
    )
    sinks = torch.empty(6, device="meta")
    for traits in (Traits(0.1, window), Traits(0.1, window, softcap=3.0, sinks=sinks)):
        with NothingReadBack():
            result = made.begin(spans, never_wait).attend(1, query, key, value, traits)

        assert result.device.type == "meta"
        assert result.dtype == torch.bfloat16
        assert result.shape == (15, 6, 64)
