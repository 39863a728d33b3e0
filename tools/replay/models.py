"""Bytes of KV a token: of a model's config, or of one of the models that people ask about."""

import json
from pathlib import Path

from hicache.errors import ConfigError
from hicache.layout import ITEM_NBYTES, KVLayout

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
"""Short names of KV dtypes."""

_MHA: dict[str, tuple[int, int, int]] = {
    "llama-2-7b": (32, 32, 128),
    "llama-2-13b": (40, 40, 128),
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b": (80, 8, 128),
    "llama-3.1-405b": (126, 8, 128),
    "llama-3.2-1b": (16, 8, 64),
    "llama-3.2-3b": (28, 8, 128),
    "mistral-7b": (32, 8, 128),
    "mixtral-8x7b": (32, 8, 128),
    "mixtral-8x22b": (56, 8, 128),
    "phi-4": (40, 10, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen2.5-32b": (64, 8, 128),
    "qwen2.5-72b": (80, 8, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3-30b-a3b": (48, 4, 128),
    "qwen3-235b-a22b": (94, 4, 128),
    "smollm2-135m": (30, 3, 64),
}
"""Layers, key-value heads, head size."""

_MLA: dict[str, tuple[int, int]] = {
    "deepseek-v2-lite": (27, 512 + 64),
    "deepseek-v3": (61, 512 + 64),
    "kimi-k2": (61, 512 + 64),
}
"""Layers, latent and rotary part together."""

PRESETS = (*_MHA, *_MLA)


def token_nbytes(model: str, dtype: str = "bf16") -> int:
    """Return the bytes of KV that a token has in a preset, or in a model's directory.

    Raises ``ConfigError`` in one line for what is neither.
    """
    name = DTYPES.get(dtype, dtype)
    if name not in ITEM_NBYTES:
        raise ConfigError(f"--kv-dtype {dtype}: not one of {', '.join(DTYPES)}")
    if model in _MHA:
        layers, heads, size = _MHA[model]
        return KVLayout(layers, heads, size, name, 1).token_nbytes
    if model in _MLA:
        layers, size = _MLA[model]
        return KVLayout(layers, 1, size, name, 1, "mla").token_nbytes
    path = Path(model) / "config.json"
    if not path.exists():
        raise ConfigError(
            f"--model {model}: neither a directory with a config.json nor one of "
            f"{', '.join(PRESETS)}"
        )
    return _of_config(path, name)


def _of_config(path: Path, dtype: str) -> int:
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        layers = int(config["num_hidden_layers"])
        if config.get("kv_lora_rank"):
            size = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
            return KVLayout(layers, 1, size, dtype, 1, "mla").token_nbytes
        heads = int(config["num_attention_heads"])
        size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        return KVLayout(
            layers, int(config.get("num_key_value_heads") or heads), size, dtype, 1
        ).token_nbytes
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: no model config that says what KV is: {error!r}") from None
