"""How fast pages are named, beside the hash function alone."""

import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from hicache.keys import KEY_NBYTES, TOKEN_NBYTES, chain
from hicache.tools.report import Figures

BARS = {16: 15.0, 64: 60.0}
"""Million tokens a second, by page size."""


def run(json_path: Path | None = None, *, is_quick: bool = False) -> int:
    """Measure ``keys.chain``, print the figures, and return the exit code."""
    num_tokens = 16_384 if is_quick else 131_072
    repetitions = 5 if is_quick else 25
    tokens = os.urandom(num_tokens * TOKEN_NBYTES)
    parent = os.urandom(KEY_NBYTES)
    figures = Figures(f"Page keys of {num_tokens:,} tokens")
    for page_size, bar in BARS.items():
        page_nbytes = page_size * TOKEN_NBYTES

        def name_pages(page_nbytes: int = page_nbytes) -> None:
            chain(parent, tokens, page_nbytes)

        seconds = [_seconds(name_pages) for _ in range(repetitions)]
        rates = [num_tokens / second / 1e6 for second in seconds]
        figures.add(
            f"keys.page{page_size}",
            max(rates),
            "M tokens/s",
            at_least=bar,
            spread=(min(rates), max(rates)),
        )
    seconds = [_seconds(lambda: sha256(tokens).digest()) for _ in range(repetitions)]
    rates = [num_tokens / second / 1e6 for second in seconds]
    figures.add("keys.sha256", max(rates), "M tokens/s", spread=(min(rates), max(rates)))
    return figures.report(json_path)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
