"""Prefixes as people say and read them: text, where there is a tokenizer, or token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hicache.config import cache_directory
from hicache.errors import InputError
from hicache.keys import TOKEN_NBYTES, unpack
from hicache.tools.traces.tokenizing import load

SMALL_MODEL = "smollm2"
_REPLACEMENT = "\ufffd"
_SHOWN_IDS = 12


class Decoder(Protocol):
    """What makes text of tokens."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        ...


def load_decoder(name: str) -> Decoder:
    """Return the tokenizer in a file or a model's directory, or the small model's.

    Raises ``InputError`` where there is none.
    """
    if name != SMALL_MODEL:
        return load(Path(name))
    found = sorted((cache_directory() / "models").glob("SmolLM2-135M-Instruct-*/tokenizer.json"))
    if not found:
        raise InputError(f"{name}: no server has used it here yet, so its tokenizer is not there")
    return load(found[-1])


@dataclass(frozen=True, slots=True)
class TextPrefix:
    """All sequences whose text begins so, however it was cut into tokens."""

    text: str
    decoder: Decoder

    def is_reached(self, tokens: bytes) -> bool:
        """Whether a sequence is long enough to begin so, and does."""
        return self._decoded(tokens).startswith(self.text)

    def is_possible(self, tokens: bytes) -> bool:
        """Whether a sequence may go on to begin so."""
        decoded = self._decoded(tokens)
        return decoded.startswith(self.text) or self.text.startswith(decoded)

    def _decoded(self, tokens: bytes) -> str:
        text = self.decoder.decode(unpack(tokens), skip_special_tokens=False)
        return text.rstrip(_REPLACEMENT)  # a character that the next page completes


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """All sequences that begin with these tokens."""

    tokens: bytes

    def is_reached(self, tokens: bytes) -> bool:
        """Whether a sequence is long enough to begin so, and does."""
        return tokens.startswith(self.tokens)

    def is_possible(self, tokens: bytes) -> bool:
        """Whether a sequence may go on to begin so."""
        return tokens.startswith(self.tokens) or self.tokens.startswith(tokens)


Prefix = TextPrefix | TokenPrefix


def label(tokens: bytes, decoder: Decoder | None, width: int) -> str:
    """Return the beginning of a page as one line of at most ``width`` characters."""
    if decoder is None:
        ids = unpack(tokens[: _SHOWN_IDS * TOKEN_NBYTES])
        text = " ".join(str(one) for one in ids)
        is_cut = len(tokens) > _SHOWN_IDS * TOKEN_NBYTES
    else:
        text = decoder.decode(unpack(tokens), skip_special_tokens=False).strip(" ")
        text, is_cut = text.replace("\n", "⏎"), False
        text = "".join(char if char.isprintable() else "·" for char in text)
    if is_cut or len(text) > width:
        return text[: width - 1].rstrip() + "…"
    return text
