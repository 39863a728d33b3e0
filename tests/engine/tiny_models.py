"""Tiny models of many architectures, with random weights, made in a second on the spot.

``tiny_model_dir(tmp_path, "llama")``
    a directory that ``load_model(EngineConfig(model=str(directory)))`` can load: config, weights
    and tokenizer. Same kind, same weights, in every run. Its greedy text is nonsense, but
    settled nonsense: its logits have no near-ties.
``tiny_model(tmp_path, "llama", dtype="float32")``
    the same, loaded.
``load_own(loaded)``
    the same model as HF runs it, to compare with.
``tiny_tokenizer()``
    its tokenizer: bytes as tokens, and a few merges, so that one character can be several tokens;
    ``<|im_start|>``, ``<|im_end|>`` (the end of a text), and a chat template like SmolLM2's.
``KINDS``, ``UNSUPPORTED``
    kinds that run on pages, and kinds that the engine must refuse.
``LAYERS``, ``KV_HEADS``, ``HEAD_DIM``, ``WINDOW``
    the form of those that run; windows are short, so that short prompts feel them.

A test that needs one directory many times may keep it: ``tmp_path_factory.mktemp("model")`` in a
fixture of module scope.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hicache.config import EngineConfig
from hicache.engine.loading import load_model
from hicache.engine.model import LoadedModel
from hicache.engine.quiet import quiet_transformers

LAYERS = 3
KV_HEADS = 2
HEAD_DIM = 16
WINDOW = 12
VOCABULARY = 320
CONTEXT = 1024

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = (
    "You are a helpful assistant. The quick brown fox jumps over the lazy dog. "
    "What is the capital of France? The capital of France is Paris. "
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
}

_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "gpt_oss": {"sliding_window": WINDOW, **_EXPERTS},
    "mixtral": {"sliding_window": None, **_EXPERTS},
}

_BASE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64}

_REFUSED: dict[str, dict[str, Any]] = {
    "falcon": {
        **_BASE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "new_decoder_architecture": True,
        "num_kv_heads": KV_HEADS,
    },
    "bloom": {**_BASE, "n_layer": LAYERS, "n_head": 4},
    "jamba": {
        **_COMMON,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 4,
        "mamba_d_conv": 2,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "deepseek_v3": {
        **_COMMON,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}

KINDS = tuple(_OWN)
UNSUPPORTED = tuple(_REFUSED)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a chat template, ``VOCABULARY`` tokens at most."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    make: Any = PreTrainedTokenizerFast
    made = make(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    assert isinstance(made, PreTrainedTokenizerFast)
    return made


def tiny_hf_model(kind: str = "llama", **overrides: object) -> PreTrainedModel:
    """Return a model of HF's own, float32, with random weights that depend on ``kind`` only."""
    own = _REFUSED[kind] if kind in _REFUSED else {**_COMMON, **_OWN[kind]}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **{**own, **special, **overrides})
    with quiet_transformers(), torch.random.fork_rng(devices=()):
        torch.manual_seed(20)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def load_own(loaded: LoadedModel) -> PreTrainedModel:
    """Return the same model with HF's own attention.

    From the same file: where weights lie in memory decides about last bits of a product.
    """
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            loaded.directory, dtype=loaded.dtype, local_files_only=True
        )
    assert isinstance(model, PreTrainedModel)
    return model


def tiny_model_dir(directory: Path, kind: str = "llama", **overrides: object) -> Path:
    """Write a model and its tokenizer into a new folder of ``directory``; return the folder.

    ``overrides`` go into its config.
    """
    target = directory / f"tiny-{kind}"
    with quiet_transformers():
        tiny_hf_model(kind, **overrides).save_pretrained(target)
        tiny_tokenizer().save_pretrained(target)
    return target


def tiny_model(directory: Path, kind: str = "llama", dtype: str = "float32") -> LoadedModel:
    """Write a tiny model and load it."""
    settings = {"model": str(tiny_model_dir(directory, kind)), "device": "cpu", "dtype": dtype}
    return load_model(EngineConfig.model_validate(settings))
