"""Sizes of a tier as people write them: pages, tokens or bytes."""

import re
from dataclasses import dataclass
from typing import Literal

from hicache.errors import ConfigError

_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(B|p|)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Size:
    """An amount of KV: ``30000p`` is pages, ``2M`` tokens, ``8GB`` bytes (10**9)."""

    amount: int
    unit: Literal["pages", "tokens", "bytes"]

    @classmethod
    def parse(cls, text: str) -> "Size":
        """Read a size; raise ``ConfigError`` for anything else."""
        found = _PATTERN.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"{text!r} is no size: write 30000p (pages), 2M (tokens) or 8GB (bytes)"
            )
        number, factor, suffix = found.groups()
        units: dict[str, Literal["pages", "tokens", "bytes"]]
        units = {"p": "pages", "": "tokens", "B": "bytes"}
        return cls(round(float(number) * _FACTORS[factor]), units[suffix])

    def num_pages(self, page_size: int, page_nbytes: int) -> int:
        """Return how many whole pages it is."""
        if self.unit == "pages":
            return self.amount
        return self.amount // (page_size if self.unit == "tokens" else page_nbytes)

    def nbytes(self, page_size: int, page_nbytes: int) -> int:
        """Return how many bytes of KV it is."""
        if self.unit == "bytes":
            return self.amount
        return self.num_pages(page_size, page_nbytes) * page_nbytes
