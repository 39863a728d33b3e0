"""Requests to an engine, and what each of them cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from hicache.actions import HitTokens
from hicache.engine.completion import Completion
from hicache.engine.engine import Engine
from hicache.engine.outputs import SamplingParams
from hicache.errors import HiCacheError


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, and what came of it."""

    prompt_tokens: int
    hit: HitTokens
    token_ids: tuple[int, ...]
    ttft_s: float
    """From arrival to the first token."""

    @classmethod
    def of(cls, completion: Completion) -> "Turn":
        """Return it; raise ``HiCacheError`` where the engine could not compute it."""
        timing = completion.timing
        if completion.error is not None or timing.first_token is None:
            raise HiCacheError(completion.error or "a request was answered without a token")
        return cls(
            prompt_tokens=completion.prompt_tokens,
            hit=completion.hit,
            token_ids=tuple(completion.token_ids),
            ttft_s=timing.first_token - timing.arrived,
        )


def greedy(num_tokens: int, *, to_the_end: bool = True) -> SamplingParams:
    """Return how to choose: always the best token, ``num_tokens`` of them if ``to_the_end``."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=to_the_end)


def take_turns(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Turn]:
    """Run requests all at once, and wait for the end of the last."""
    generations = [engine.submit(prompt_ids, params) for prompt_ids in prompts]
    return [Turn.of(Completion.of(generation)) for generation in generations]


def take_turn(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> Turn:
    """Run one request and wait for its end."""
    return Turn.of(Completion.of(engine.submit(prompt_ids, params)))
