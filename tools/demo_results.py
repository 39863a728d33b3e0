"""What ``hicache demo`` found: its turns, what they come to, and what is wrong with them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from hicache.actions import HitTokens

TIERS = {"device": "L1", "host": "L2", "storage": "L3"}


@dataclass(slots=True)
class Turn:
    """A question, its answer with the cache and, once that has been tried, without."""

    chat: str
    question: str
    answer: str
    prompt_ids: list[int]
    token_ids: list[int]
    hit: HitTokens
    ttft_s: float
    is_after_restart: bool = False
    computed_token_ids: list[int] | None = None
    computed_ttft_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def is_equal(self) -> bool:
        """Whether the same tokens came out without the cache."""
        return self.token_ids == self.computed_token_ids


@dataclass(slots=True)
class Results:
    """All turns, in their order."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def before_restart(self) -> list[Turn]:
        """Turns of the first process."""
        return [turn for turn in self.turns if not turn.is_after_restart]

    @property
    def after_restart(self) -> list[Turn]:
        """Turns of the second."""
        return [turn for turn in self.turns if turn.is_after_restart]

    @property
    def cached_p50_s(self) -> float:
        """Median time to first token with the cache."""
        return median(turn.ttft_s for turn in self.turns)

    @property
    def computed_p50_s(self) -> float:
        """Median time to first token without."""
        return median(turn.computed_ttft_s or 0.0 for turn in self.turns)

    @property
    def speedup(self) -> float:
        """How many times faster the first token comes."""
        return self.computed_p50_s / self.cached_p50_s

    def problems(self) -> list[str]:
        """Return what makes the demo a failure, a line each."""
        found = [
            f"{turn.chat}: {turn.question} The answer is another without the cache"
            for turn in self.turns
            if not turn.is_equal
        ]
        hits = total_hit(self.before_restart)
        found += [
            f"no prompt token came from {name}, {tier}"
            for tier, name in TIERS.items()
            if not getattr(hits, tier)
        ]
        found += [
            f"{turn.chat}: nothing was found on disk after the restart"
            for turn in self.after_restart
            if not turn.hit.storage
        ]
        return found

    def as_json(self) -> dict[str, object]:
        """Return the results as they are written to a file.

        ``turns``, ``prompt_tokens`` and ``hit_tokens`` are of the first process, times of all.
        """
        first, second = self.before_restart, self.after_restart
        return {
            "equal": all(turn.is_equal for turn in self.turns),
            "turns": len(first),
            "prompt_tokens": total_prompt(first),
            "hit_tokens": _by_tier(total_hit(first)),
            "after_restart": {
                "prompt_tokens": total_prompt(second),
                "hit_tokens": _by_tier(total_hit(second)),
            },
            "ttft_s": {"cached_p50": self.cached_p50_s, "computed_p50": self.computed_p50_s},
            "speedup": self.speedup,
        }


def total_prompt(turns: Iterable[Turn]) -> int:
    """Return the prompt tokens of several turns."""
    return sum(turn.prompt_tokens for turn in turns)


def total_hit(turns: Sequence[Turn]) -> HitTokens:
    """Return the hits of several turns."""
    return HitTokens(
        sum(turn.hit.device for turn in turns),
        sum(turn.hit.host for turn in turns),
        sum(turn.hit.storage for turn in turns),
    )


def _by_tier(hit: HitTokens) -> dict[str, int]:
    return {"device": hit.device, "host": hit.host, "storage": hit.storage}
