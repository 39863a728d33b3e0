"""Prompts for benchmarks: English words without sense, in exact numbers of tokens."""

import random
from collections.abc import Callable
from itertools import count

WORDS = """
the a harbour light stone river winter morning old green small quiet wind boat letter window
market bread song field bridge road garden lamp clock keeper sailor visitor child teacher opens
closes carries finds remembers leaves brings turns begins waits under over behind near and but
because while again never often slowly first last seven twelve blue copper paper
"""

FIRST_IDS = range(1000, 30_000)
"""Token ids that no two prompts share as their first: then they share no prefix at all."""


class Prompts:
    """Makes prompts of which no two begin alike. Same seed, same prompts."""

    def __init__(self, encode: Callable[[str], list[int]], seed: int = 1) -> None:
        self._encode = encode
        self._random = random.Random(seed)
        self._first_ids = count(FIRST_IDS.start)

    def take(self, num_tokens: int) -> list[int]:
        """Return the next prompt."""
        text = " ".join(self._random.choices(WORDS.split(), k=num_tokens))
        ids = [next(self._first_ids), *self._encode(text)][:num_tokens]
        assert len(ids) == num_tokens  # a word has at least one token
        assert ids[0] in FIRST_IDS
        return ids
