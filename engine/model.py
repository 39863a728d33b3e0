"""A model that is ready to run on pages, and what the engine must know of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hicache.engine.attention_choice import AttentionName
from hicache.engine.template import ChatTemplate
from hicache.layout import KVLayout
from hicache.namespace import Namespace, canonical_config, weights_fingerprint


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves behind in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LoadedModel:
    """A HF model with our attention, its tokenizer, and what was found out about both."""

    name: str
    """The last part of its path."""
    directory: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    """Of weights and compute; of KV too, if ``kv_dtype`` is not set."""
    kv: KVShape
    context_tokens: int
    """Longest sequence: what the config asks for, else what the model was made for."""
    vocab_size: int
    """Rows of the logits: a token id is below it."""
    eos_token_ids: frozenset[int]
    kv_dtype: torch.dtype | None = None
    """Of KV, where it is another."""
    attention: AttentionName = "torch"
    """What attends over its pages."""
    prefill_tokens_per_s: float = 0.0
    """Measured at load, from one short prefill; a seed for what is measured later."""

    @cached_property
    def template(self) -> ChatTemplate:
        """How a chat becomes tokens."""
        return ChatTemplate(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt that is plain text."""
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without the special ones."""
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def layout_for(self, page_size: int) -> KVLayout:
        """Return what a page of this model is."""
        return KVLayout(
            num_layers=self.kv.num_layers,
            num_kv_heads=self.kv.num_kv_heads,
            head_dim=self.kv.head_dim,
            dtype=str(self.kv_dtype or self.dtype).removeprefix("torch."),
            page_size=page_size,
        )

    def namespace(
        self, layout: KVLayout, salt: str | None = None, lora: bytes | None = None
    ) -> Namespace:
        """Return what must be equal for two pages of this model to be interchangeable."""
        return Namespace(
            model_config=self._canonical_config, weights=self._weights, layout=layout, lora=lora
        ).salted(salt)

    @cached_property
    def _canonical_config(self) -> str:
        return canonical_config(self.model.config.to_dict() | {"compute": str(self.dtype)})

    @cached_property
    def _weights(self) -> bytes:
        return weights_fingerprint(self.directory)
