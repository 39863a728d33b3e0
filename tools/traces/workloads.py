"""The sessions of each kind of load: what is asked, after what, and of which pieces it is made.

A piece is a text that somebody wrote once: equal names are equal texts. A session draws from its
own generator, so that it does not depend on how many others there are.
"""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count
from random import Random

from hicache.tools.traces.shapes import Agents, Chat, Rag, Shape, SystemPrompts, Tree

LENGTH_SPREAD = 0.4
"""Standard deviation of the logarithm of a length."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of tokens of an input."""

    name: tuple[int | str, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    time_s: float
    """Since the start of the session."""
    pieces: tuple[Piece, ...]
    num_output_tokens: int
    parent: int | None
    """Index within the session."""


class Draw:
    """The chances of one session, and names for what only it says."""

    def __init__(self, seed: int, session: int) -> None:
        self.random = Random(f"{seed}/{session}")
        self._session = session
        self._numbers = count()

    def length(self, mean: int) -> int:
        """Return a length around a mean, 1 at least."""
        factor = self.random.lognormvariate(-(LENGTH_SPREAD**2) / 2, LENGTH_SPREAD)
        return max(1, round(mean * factor))

    def own(self, mean: int) -> Piece:
        """Return a piece that is in no other session."""
        return self.sized(self.length(mean))

    def sized(self, num_tokens: int) -> Piece:
        """Return such a piece of a given length."""
        return Piece((self._session, next(self._numbers)), num_tokens)

    def wait_s(self, mean_s: float) -> float:
        """Return a time around a mean, with the tail that waiting has."""
        return self.random.expovariate(1 / mean_s) if mean_s else 0.0

    def ranked(self, number: int, skew: float) -> int:
        """Return one of so many things, the first ones more often."""
        weights = _weights(number, skew)
        return min(bisect(weights, self.random.random() * weights[-1]), number - 1)


@lru_cache(maxsize=8)
def _weights(number: int, skew: float) -> list[float]:
    return list(accumulate((rank + 1) ** -skew for rank in range(number)))


def shared(seed: int, name: str, number: int, mean: int) -> Piece:
    """Return a piece that sessions have in common; its length is its own, whoever asks."""
    draw = Draw(seed, 0)
    draw.random.seed(f"{seed}/{name}/{number}")
    return Piece((name, number), draw.length(mean))


def turns(shape: Shape, seed: int, session: int) -> list[Turn]:
    """Return the requests of a session, in the order of their times."""
    draw = Draw(seed, session)
    match shape:
        case Chat():
            found = _chat(shape, draw, seed)
        case SystemPrompts():
            found = _system_prompts(shape, draw, seed)
        case Rag():
            found = _rag(shape, draw, seed)
        case Agents():
            found = _agents(shape, draw, seed)
        case Tree():
            found = _tree(shape, draw, seed)
        case _:
            raise AssertionError(f"{type(shape).__name__} has no sessions")
    return list(found)


def _system(seed: int, mean: int, number: int = 0) -> tuple[Piece, ...]:
    return (shared(seed, "system", number, mean),) if mean else ()


def _chat(shape: Chat, draw: Draw, seed: int) -> Iterator[Turn]:
    pieces, time_s = _system(seed, shape.system_tokens), 0.0
    for turn in range(shape.turns):
        pieces += (draw.own(shape.user_tokens),)
        answer = draw.own(shape.output_tokens)
        yield Turn(time_s, pieces, answer.num_tokens, turn - 1 if turn else None)
        pieces += (answer,)
        time_s += answer.num_tokens / shape.decode_rate + draw.wait_s(shape.think_s)


def _system_prompts(shape: SystemPrompts, draw: Draw, seed: int) -> Iterator[Turn]:
    number = draw.ranked(shape.prompts, shape.skew)
    pieces = (*_system(seed, shape.system_tokens, number), draw.own(shape.user_tokens))
    yield Turn(0.0, pieces, draw.length(shape.output_tokens), None)


def _rag(shape: Rag, draw: Draw, seed: int) -> Iterator[Turn]:
    wanted = min(shape.documents_a_question, shape.documents)
    numbers: dict[int, None] = {}
    for _ in range(64 * wanted):
        numbers[draw.ranked(shape.documents, shape.skew)] = None
        if len(numbers) == wanted:
            break
    found = (shared(seed, "document", number, shape.document_tokens) for number in numbers)
    pieces = (*_system(seed, shape.system_tokens), *found, draw.own(shape.user_tokens))
    yield Turn(0.0, pieces, draw.length(shape.output_tokens), None)


def _agents(shape: Agents, draw: Draw, seed: int) -> Iterator[Turn]:
    pieces, time_s = _system(seed, shape.system_tokens), 0.0
    turn = 0
    for _ in range(shape.tasks):
        pieces += (draw.own(shape.user_tokens),)
        for call in range(shape.calls + 1):
            answer = draw.own(shape.output_tokens)
            yield Turn(time_s, pieces, answer.num_tokens, turn - 1 if turn else None)
            turn += 1
            pieces += (answer,)
            time_s += answer.num_tokens / shape.decode_rate
            if call < shape.calls:
                pieces += (draw.own(shape.result_tokens),)
                time_s += draw.wait_s(shape.tool_s)
        time_s += draw.wait_s(shape.think_s)


def _tree(shape: Tree, draw: Draw, seed: int) -> Iterator[Turn]:
    question = (*_system(seed, shape.system_tokens), draw.own(shape.user_tokens))
    kept: list[tuple[int | None, tuple[Piece, ...]]] = [(None, question)]
    time_s, index = 0.0, 0
    for _ in range(shape.depth):
        thoughts: list[tuple[int | None, tuple[Piece, ...]]] = []
        longest = 0
        for parent, pieces in kept:
            for _ in range(shape.branches):
                thought = draw.own(shape.output_tokens)
                yield Turn(time_s, pieces, thought.num_tokens, parent)
                thoughts.append((index, (*pieces, thought)))
                longest = max(longest, thought.num_tokens)
                index += 1
        kept = draw.random.sample(thoughts, min(shape.kept, len(thoughts)))
        time_s += longest / shape.decode_rate
