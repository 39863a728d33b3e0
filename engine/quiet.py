"""Keeps HF transformers quiet while it loads: what matters we say ourselves."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within it HF shows no progress bars, logs errors only, and warns of nothing."""
    verbosity = logging.get_verbosity()
    had_progress = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress:
            logging.enable_progress_bar()
