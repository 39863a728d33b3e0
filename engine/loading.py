"""From a setting to a model that is ready to run: ``load_model``."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hicache.config import EngineConfig
from hicache.engine import attention, smollm2
from hicache.engine.attention_choice import choose_attention
from hicache.engine.model import LoadedModel
from hicache.engine.probe import check_config, check_model, observe
from hicache.engine.quiet import quiet_transformers
from hicache.errors import ConfigError

log = logging.getLogger("hicache.engine.loading")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

KV_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn}


def load_model(config: EngineConfig) -> LoadedModel:
    """Return the model that the settings name, probed and ready.

    Reads local files only, never the network. Raises ``ConfigError``, in one line, for whatever
    is wrong with the settings, the files, or the model.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    directory = smollm2.model_directory() if config.model == smollm2.NAME else Path(config.model)
    _check_files(directory)
    device = _device(config.device)
    with quiet_transformers():
        hf_config = _load_config(directory)
        check_config(directory.name, hf_config)
        dtype = _dtype(config.dtype, device, hf_config)
        tokenizer = _load_tokenizer(directory)
        model = _load_weights(directory, hf_config, dtype, device)
    text_config = hf_config.get_text_config(decoder=True)
    kv = observe(directory.name, model)
    kv_dtype = None if config.kv_dtype == "auto" else KV_DTYPES[config.kv_dtype]
    loaded = LoadedModel(
        name=config.model if config.model == smollm2.NAME else directory.resolve().name,
        directory=directory,
        model=model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        kv=kv,
        kv_dtype=kv_dtype,
        attention=choose_attention(config.attention, device, dtype, kv_dtype or dtype, kv.head_dim),
        context_tokens=_context_tokens(config, text_config),
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )
    loaded = checked(loaded)
    log.info(
        "loaded %s: %d layers, %s on %s, attention by %s, %.0f tokens/s of prefill",
        loaded.name,
        loaded.kv.num_layers,
        dtype,
        device,
        loaded.attention,
        loaded.prefill_tokens_per_s,
    )
    return loaded


def checked(loaded: LoadedModel) -> LoadedModel:
    """Return the model with its prefill rate, and with torch's attention if the other's fails.

    The first forward is where kernels are compiled, and where a compiler may be missing.
    """
    if loaded.attention != "torch":
        try:
            check_model(loaded)  # compiles what is missing, which must not count as slow prefill
            return replace(loaded, prefill_tokens_per_s=check_model(loaded))
        except Exception as error:  # whatever a compiler, a driver or an older version raises
            log.debug("attention by %s failed", loaded.attention, exc_info=True)
            log.warning(
                "attention by torch, which is slower: that by %s failed: %s",
                loaded.attention,
                _line(error),
            )
            loaded = replace(loaded, attention="torch")
    return replace(loaded, prefill_tokens_per_s=check_model(loaded))


def _check_files(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(
            f"engine.model: {directory}: no such directory (a local one with a HF model, "
            f"or {smollm2.NAME})"
        )
    if not (directory / "config.json").is_file():
        raise ConfigError(f"engine.model: {directory}: there is no config.json in it")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"engine.model: {directory}: there is no *.safetensors file in it")
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"engine.model: {directory}: there is no tokenizer in it")


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device: {name!r} is no device: cpu, cuda, cuda:1, …") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {name}: only cpu and cuda can be used")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"engine.device: {name}: there is no such CUDA device here")
    return device


def _dtype(name: str, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    stored = config.dtype
    if device.type == "cpu" or stored not in DTYPES.values():
        return torch.float32
    assert isinstance(stored, torch.dtype)
    return stored


def _load_config(directory: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"engine.model: {directory}: config.json: {_line(error)}") from None
    assert isinstance(config, PreTrainedConfig)
    return config


def _load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"engine.model: {directory}: its tokenizer: {_line(error)}") from None
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _load_weights(
    directory: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    try:
        auto: Any = AutoModelForCausalLM
        model, report = auto.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        model.to(device).eval().requires_grad_(False)
    except SafetensorError as error:
        raise ConfigError(f"engine.model: {directory}: its weights: {_line(error)}") from None
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        line = _line(error)
        if attention.NAME in line:
            line = "its attention cannot be replaced, so it cannot be run on pages"
        raise ConfigError(f"engine.model: {directory}: {line}") from None
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"engine.model: {directory}: {len(missing)} weights are missing from its files, "
            f"such as {missing[0]}"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _context_tokens(config: EngineConfig, text_config: PreTrainedConfig) -> int:
    limit = getattr(text_config, "max_position_embeddings", None)
    if config.context_tokens is None:
        return int(limit or 4096)
    if limit and config.context_tokens > limit:
        raise ConfigError(
            f"engine.context_tokens: {config.context_tokens} is more than the model's own {limit}"
        )
    return config.context_tokens


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return every token that ends a text: the generation config may name several."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids: object = getattr(source, "eos_token_id", None)
        for token_id in ids if isinstance(ids, list) else [ids]:
            if isinstance(token_id, int):
                found.add(token_id)
    return frozenset(found)


def _line(error: BaseException) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split())[:300] or type(error).__name__
