"""Keeps HF transformers quiet while it loads: what matters we say ourselves."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as hf_logging

_hf: Any = hf_logging  # its functions have no types


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within it HF shows no progress bars, logs errors only, and warns of nothing."""
    verbosity = _hf.get_verbosity()
    had_progress = _hf.is_progress_bar_enabled()
    _hf.set_verbosity_error()
    _hf.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _hf.set_verbosity(verbosity)
        if had_progress:
            _hf.enable_progress_bar()
