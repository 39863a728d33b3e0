"""Models that would compute something else on pages are refused, in one line, when they load."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hicache.config import EngineConfig
from hicache.engine.loading import load_model
from hicache.engine.model import KVShape
from hicache.engine.probe import check_config, check_model, observe
from hicache.errors import ConfigError
from tests.engine.tiny_models import (
    HEAD_DIM,
    KINDS,
    KV_HEADS,
    LAYERS,
    UNSUPPORTED,
    tiny_model,
    tiny_model_dir,
)

REASONS = {
    "falcon": "attention cannot be replaced",
    "bloom": "0 of its 3 layers",
    "jamba": "layers of these kinds are not supported yet: linear_attention",
    "deepseek_v3": "MLA",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_token_leaves_behind_is_read_off_a_real_forward(tmp_path: Path, kind: str) -> None:
    loaded = tiny_model(tmp_path, kind)

    assert loaded.kv == KVShape(LAYERS, KV_HEADS, HEAD_DIM)
    assert loaded.layout_for(8).page_shape == (LAYERS, 2, 8, KV_HEADS, HEAD_DIM)
    assert loaded.prefill_tokens_per_s > 0


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_model_that_cannot_run_on_pages_is_refused(tmp_path: Path, kind: str) -> None:
    directory = tiny_model_dir(tmp_path, kind)

    with pytest.raises(ConfigError, match=REASONS[kind]) as caught:
        load_model(EngineConfig(model=str(directory), device="cpu"))

    assert "\n" not in str(caught.value)
    assert f"tiny-{kind}" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("llama4_text", {"num_hidden_layers": 4}, "chunked_attention"),
        ("qwen3_next", {"num_hidden_layers": 4}, "linear_attention"),
        ("mamba", {}, "not supported"),
    ],
)
def test_what_a_config_gives_away_is_refused_before_the_weights_are_read(
    kind: str, settings: dict[str, object], reason: str
) -> None:
    config = AutoConfig.for_model(kind, **settings)

    with pytest.raises(ConfigError, match=reason):
        check_config("some-model", config)


@contextlib.contextmanager
def patched_projection(loaded_layer: torch.nn.Module, offset: float) -> Iterator[None]:
    """Let one layer add a constant for every forward that it has seen before: a hidden state."""
    num_forwards = 0

    def hook(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        return output + offset * num_forwards

    handle = loaded_layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_a_model_that_uses_a_layer_twice_is_refused(tmp_path: Path) -> None:
    loaded = tiny_model(tmp_path, "llama")

    def again(
        layer: torch.nn.Module, inputs: tuple[object, ...], options: dict[str, object], _: object
    ) -> object:
        return layer.forward(*inputs, **options)

    loaded.model.get_submodule("model.layers.0").register_forward_hook(again, with_kwargs=True)

    with pytest.raises(ConfigError, match="it cannot be run on pages"):
        observe("twice", loaded.model)


def test_a_model_whose_logits_depend_on_the_chunks_is_refused(tmp_path: Path) -> None:
    loaded = tiny_model(tmp_path, "llama")
    check_model(loaded)

    with (
        patched_projection(loaded.model.get_submodule("model.layers.1.mlp"), 0.5),
        pytest.raises(ConfigError, match="its logits are off by"),
    ):
        check_model(loaded)


def test_a_model_that_overflows_is_refused(tmp_path: Path) -> None:
    loaded = tiny_model(tmp_path, "llama")
    with torch.no_grad():
        loaded.model.get_parameter("model.norm.weight").fill_(float("nan"))

    with pytest.raises(ConfigError, match="its logits are off by nan"):
        check_model(loaded)
