"""A Llama with random weights, in the shape of one of 8 billion, made where it is to run."""

import random
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hicache.engine.attention import NAME
from hicache.engine.attention_choice import choose_attention
from hicache.engine.engine import Engine
from hicache.engine.loading import checked
from hicache.engine.model import LoadedModel
from hicache.engine.probe import observe
from hicache.engine.quiet import quiet_transformers
from hicache.tools.turns import Turn, greedy, take_turn

_EIGHT_BILLION = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 40960,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


def random_llama(device: str, *, is_tiny: bool | None = None) -> LoadedModel:
    """Return a model that is ready to run; by default a tiny one on a CPU, else a large one.

    Its texts mean nothing.
    """
    where = torch.device(device)
    is_tiny = where.type == "cpu" if is_tiny is None else is_tiny
    own = _TINY if is_tiny else _EIGHT_BILLION
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    config = AutoConfig.for_model("llama", **own, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with quiet_transformers(), where:
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=dtype).eval().requires_grad_(False)
        model.set_attn_implementation(NAME)
    assert isinstance(model, PreTrainedModel)
    kv = observe("random llama", model)
    loaded = LoadedModel(
        name="random-llama",
        directory=_directory_of_weights(),
        model=model,
        tokenizer=_tokenizer(),
        device=where,
        dtype=dtype,
        kv=kv,
        context_tokens=int(own["max_position_embeddings"]),
        vocab_size=int(own["vocab_size"]),
        eos_token_ids=frozenset(),
        attention=choose_attention("auto", where, dtype, dtype, kv.head_dim),
    )
    return checked(loaded)


def _directory_of_weights() -> Path:
    """Return a directory that stands for the weights: they are the same whenever they are made."""
    directory = Path(tempfile.mkdtemp(prefix="gpucheck-weights-"))
    save_file({"seed": torch.zeros(1)}, str(directory / "model.safetensors"))
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer: Any = Tokenizer(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    )
    make: Any = PreTrainedTokenizerFast
    made = make(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    assert isinstance(made, PreTrainedTokenizerFast)
    return made


class RandomPrompts:
    """Random tokens, of which no two begin alike."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._numbers = count(3)
        self._random = random.Random(5)

    def take(self, num_tokens: int) -> list[int]:
        """Return the next prompt."""
        number = next(self._numbers)
        first = [number % self.vocab_size, number // self.vocab_size]
        rest = self._random.choices(range(3, self.vocab_size), k=num_tokens - len(first))
        return [*first, *rest]


def ask(engine: Engine, prompt: list[int], num_tokens: int) -> Turn:
    """Run one request; return what came of it."""
    return take_turn(engine, prompt, greedy(num_tokens))
