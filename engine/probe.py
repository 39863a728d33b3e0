"""What a model can do on pages, found out by trying, when it is loaded.

Some HF models ignore an attention function that is set from outside, some keep state that is not
in keys and values, some go wrong when a prompt comes in chunks. Each would give wrong tokens in
silence, so each is looked for here and refused in one line.
"""

import time
from array import array
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from hicache.engine.attention import NAME, Traits
from hicache.engine.model import KVShape, LoadedModel
from hicache.engine.runner import Batch, ModelRunner, SequenceSlice
from hicache.errors import ConfigError

_PAGE_SIZE = 8
_NUM_TOKENS = 19
_CUTS = (0, 11, 18, _NUM_TOKENS)
_RATE_TOKENS = 96
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
_TOLERANCE_8_BIT = 0.4
"""Of the difference of logits, relative to their spread: far above rounding, far below wrong."""


def check_config(name: str, config: PreTrainedConfig) -> None:
    """Raise ``ConfigError`` for a model that its config shows to be none of ours."""
    if config.is_encoder_decoder:
        raise ConfigError(f"{name}: it is an encoder-decoder; only decoders can be run")
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise ConfigError(f"{name}: latent attention (MLA) is not supported yet")
    if getattr(text, "alibi", False):
        raise ConfigError(f"{name}: attention with ALiBi is not supported")
    kinds = set(get_layer_types_and_kwargs(text)[0]) | set(getattr(text, "layers_block_type", ()))
    others = sorted(kinds - {"full_attention", "sliding_attention", "attention"})
    if others:
        raise ConfigError(
            f"{name}: layers of these kinds are not supported yet: {', '.join(others)}"
        )


class _Observer:
    """Attends to the row itself, without pages, and remembers what it was called with."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.calls = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: Traits
    ) -> Tensor:
        self.calls += 1
        self.shapes[layer] = (key.shape[0], key.shape[2], value.shape[2])
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


@torch.inference_mode()
def observe(name: str, model: PreTrainedModel) -> KVShape:
    """Return what a token leaves behind, as a real forward shows it.

    Raises ``ConfigError`` where not every layer asks our attention, once, with one shape.
    """
    num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    observer = _Observer()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    try:
        model(input_ids=ids, position_ids=positions, use_cache=False, paged=observer)
    except (NotImplementedError, RuntimeError, TypeError, ValueError, KeyError) as error:
        line = " ".join(str(error).split())[:300]
        raise ConfigError(f"{name}: it cannot be run on pages: {line}") from None
    if observer.calls != num_layers or sorted(observer.shapes) != list(range(num_layers)):
        raise ConfigError(
            f"{name}: {len(observer.shapes)} of its {num_layers} layers use the attention that is "
            f"set for them, in {observer.calls} calls; it cannot be run on pages"
        )
    shapes = set(observer.shapes.values())
    if len(shapes) > 1:
        raise ConfigError(
            f"{name}: its layers' keys and values differ in shape, which is not supported"
        )
    num_kv_heads, key_dim, value_dim = shapes.pop()
    if key_dim != value_dim:
        raise ConfigError(
            f"{name}: keys ({key_dim}) and values ({value_dim}) differ in size; it cannot be run"
        )
    return KVShape(num_layers, num_kv_heads, key_dim)


@torch.inference_mode()
def check_model(loaded: LoadedModel) -> float:
    """Return the prefill rate in tokens/s; raise ``ConfigError`` where pages change the logits.

    The same tokens go through the model's own attention, through pages in one piece, and through
    pages in chunks.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.vocab_size, (_RATE_TOKENS,), generator=generator).tolist()
    tokens = ids[:_NUM_TOKENS]
    expected = _own_logits(loaded, tokens)
    whole = _paged_logits(loaded, tokens, (0, _NUM_TOKENS))
    cut = _paged_logits(loaded, tokens, _CUTS)
    tolerance = _TOLERANCE[loaded.dtype]
    if loaded.kv_dtype is not None and loaded.kv_dtype.itemsize == 1:
        tolerance = max(tolerance, _TOLERANCE_8_BIT)
    for logits, where in ((whole, "in one piece"), (cut, "in chunks")):
        spread = expected.std().clamp_min(1e-6)
        off = float((logits - expected).pow(2).mean().sqrt() / spread)
        if not off <= tolerance:
            raise ConfigError(
                f"{loaded.name}: computed on pages {where} its logits are off by {off:.2g} of "
                f"their spread; it cannot be run"
            )
    started = time.perf_counter()
    _paged_logits(loaded, ids, (0, _RATE_TOKENS))
    return _RATE_TOKENS / (time.perf_counter() - started)


def _own_logits(loaded: LoadedModel, tokens: list[int]) -> Tensor:
    model = loaded.model
    positions = torch.arange(len(tokens), device=loaded.device)[None]
    ids = torch.tensor([tokens], device=loaded.device)
    try:
        model.set_attn_implementation("eager")
        logits: Tensor = model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1
        ).logits[0]
    finally:
        model.set_attn_implementation(NAME)
    return logits.float()


def _paged_logits(loaded: LoadedModel, tokens: list[int], cuts: tuple[int, ...]) -> Tensor:
    layout = loaded.layout_for(_PAGE_SIZE)
    num_pages = -(-len(tokens) // _PAGE_SIZE)
    pages = torch.zeros(
        (num_pages + 1, *layout.page_shape),
        dtype=loaded.kv_dtype or loaded.dtype,
        device=loaded.device,
    )
    runner = ModelRunner(loaded, pages)
    slots = array("i", range(num_pages, 0, -1))
    logits = torch.empty(0)
    for start, end in pairwise(cuts):
        logits = runner.forward(Batch([SequenceSlice(tokens[start:end], start, slots)]))
    return logits
