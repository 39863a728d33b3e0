"""What the engine counts. The step thread writes, anybody reads: numbers only, never decisions."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from hicache.actions import HitTokens
from hicache.engine.outputs import FinishReason, Timing
from hicache.histogram import Histogram

HitTier = Literal["none", "device", "host", "storage"]

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    num_steps: int = 0
    num_failed_steps: int = 0
    num_out_of_memory: int = 0
    """Steps that the device had no memory for, and that were tried again smaller."""
    step_seconds: float = 0.0
    """Wall clock of steps in which something was computed."""
    step_cpu_seconds: float = 0.0
    """CPU time of the step thread in those steps."""
    num_prompt_tokens: int = 0
    """Of requests that have begun, cached ones included; each request counts once."""
    num_computed_tokens: int = 0
    """Prompt tokens computed, and tokens computed again after a preemption."""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_revoked: int = 0
    """Leases of which a load failed."""
    hit_tokens: dict[str, int] = field(
        default_factory=lambda: {"device": 0, "host": 0, "storage": 0}
    )
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0)
    )
    """Requests by finish reason."""
    first_token_s: dict[HitTier, Histogram] = field(
        default_factory=lambda: {tier: Histogram(TTFT_BUCKETS_S) for tier in get_args(HitTier)}
    )
    """Time to first token, by the slowest tier that the request hit."""

    def totals(self) -> dict[str, object]:
        """Return what /server_info says of them."""
        return {
            "num_steps": self.num_steps,
            "num_failed_steps": self.num_failed_steps,
            "num_out_of_memory": self.num_out_of_memory,
            "num_preemptions": self.num_preemptions,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_computed_tokens": self.num_computed_tokens,
            "num_output_tokens": self.num_output_tokens,
            "hit_tokens": dict(self.hit_tokens),
            "step_seconds": self.step_seconds,
            "step_cpu_seconds": self.step_cpu_seconds,
        }

    def count_hit(self, hit: HitTokens, num_prompt_tokens: int) -> None:
        """Count what a request that begins need not compute."""
        self.num_prompt_tokens += num_prompt_tokens
        self.hit_tokens["device"] += hit.device
        self.hit_tokens["host"] += hit.host
        self.hit_tokens["storage"] += hit.storage

    def count_first_token(self, hit: HitTokens, timing: Timing) -> None:
        """Count how long a request waited for its first token."""
        assert timing.first_token is not None
        self.first_token_s[slowest_tier(hit)].add(timing.first_token - timing.arrived)


def slowest_tier(hit: HitTokens) -> HitTier:
    """Return the slowest tier that a hit needed."""
    if hit.storage:
        return "storage"
    if hit.host:
        return "host"
    return "device" if hit.device else "none"
