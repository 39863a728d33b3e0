"""What goes into a generation and what comes out: values shared by engine, server and scripts."""

from dataclasses import dataclass
from typing import Literal

from hicache.actions import HitTokens

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    seed: int | None = None
    """Same seed, same prompt, same logits: same tokens, in whatever batch."""
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """What is new since the last one."""

    text: str
    """Whole characters only."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last one."""
    stop_match: str | int | None = None
    """The stop string or stop token id that ended it, where finish_reason is stop."""
    error: str | None = None
    """One line, where finish_reason is error."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened to a request, in seconds of ``time.monotonic``."""

    arrived: float
    first_token: float | None = None
    finished: float | None = None


__all__ = ["FinishReason", "HitTokens", "Output", "SamplingParams", "Timing"]
