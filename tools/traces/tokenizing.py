"""The tokenizer for traces and stores that are text: a Hugging Face ``tokenizer.json``."""

from pathlib import Path
from typing import TYPE_CHECKING

from hicache.errors import InputError
from hicache.tools.traces.converting import Tokenizer

if TYPE_CHECKING:
    import tokenizers


def load(path: Path) -> "tokenizers.Tokenizer":
    """Return the tokenizer in a file, or in a model's directory. Loads no torch."""
    try:
        from tokenizers import Tokenizer as Loaded
    except ModuleNotFoundError:
        raise InputError("tokenizers is missing: pip install 'hicache[engine]'") from None

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Loaded.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    # The library has no type of error of its own.
    except Exception as error:  # noqa: BLE001
        raise InputError(f"{file}: is no tokenizer: {error}") from None


def load_tokenizer(path: Path) -> Tokenizer:
    """Return what makes tokens of text; it adds no special tokens."""
    loaded = load(path)

    def tokenise(text: str) -> list[int]:
        return loaded.encode(text, add_special_tokens=False).ids

    return tokenise
