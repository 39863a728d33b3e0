"""A generation that is over: what all its outputs come to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hicache.engine.generation import Generation
from hicache.engine.outputs import FinishReason, HitTokens, Output, Timing


@dataclass(slots=True)
class Completion:
    """The outputs of one generation so far, added up."""

    generation: Generation
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None until it is over."""
    stop_match: str | int | None = None
    error: str | None = None

    @classmethod
    def of(cls, generation: Generation) -> "Completion":
        """Wait for the end of a generation, from a thread."""
        completion = cls(generation)
        completion.extend(generation)
        return completion

    def extend(self, outputs: Iterable[Output]) -> None:
        """Add outputs."""
        for output in outputs:
            self.add(output)

    def add(self, output: Output) -> None:
        """Add an output. Text grows by appending, which is amortised O(its length)."""
        self.text += output.text
        self.token_ids.extend(output.token_ids)
        self.finish_reason = output.finish_reason
        self.stop_match = output.stop_match
        self.error = output.error

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.generation.prompt_tokens

    @property
    def hit(self) -> HitTokens:
        """Prompt tokens that were not computed, by tier."""
        return self.generation.hit

    @property
    def timing(self) -> Timing:
        """When it arrived, began to answer, and ended."""
        return self.generation.timing
