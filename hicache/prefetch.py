"""Prefetch policies: how long a request waits for what storage has of it."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

WAIT_SHARE = 0.05
"""Of the time that computing the tokens would take: what best_effort waits for them at most.
A request with a hit is then never much slower than one without (DESIGN.md, 6)."""

UNKNOWN_PATIENCE_S = 0.25
"""What best_effort waits where nothing is known yet of what computing costs: enough for one
batch from a disk, too short for a person to notice."""


class PrefetchPolicy(Protocol):
    """Says how many seconds a request may wait for tokens from storage."""

    @abstractmethod
    def patience_s(self, num_tokens: int, prefill_s: float) -> float:
        """``prefill_s``: what computing the ``num_tokens`` would take; 0 where that is unknown."""


@dataclass(frozen=True, slots=True)
class BestEffort:
    """A small share of what it may save; the rest is computed."""

    def patience_s(self, num_tokens: int, prefill_s: float) -> float:
        """5 % of what computing them would take."""
        return WAIT_SHARE * prefill_s if prefill_s else UNKNOWN_PATIENCE_S


@dataclass(frozen=True, slots=True)
class WaitComplete:
    """Until all is there or known to be missing; only the backend's deadline bounds it."""

    def patience_s(self, num_tokens: int, prefill_s: float) -> float:
        """Without end."""
        return float("inf")


@dataclass(frozen=True, slots=True)
class Timeout:
    """A base and an amount for each 1,024 tokens."""

    base_s: float
    per_ki_token_s: float

    def patience_s(self, num_tokens: int, prefill_s: float) -> float:
        """Grows with the tokens, whatever they would cost to compute."""
        return self.base_s + self.per_ki_token_s * num_tokens / 1024
