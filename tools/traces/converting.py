"""What a format is: what its records look like, and what requests they are.

One format is one subclass, in a file of its own or beside its kin; ``opening`` lists them.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hicache.tools.traces.chaining import BlockIds, Chain
from hicache.tools.traces.errors import BadRecord
from hicache.tools.traces.normal import TraceInfo, TraceRequest

Tokenizer = Callable[[str], Sequence[int]]
"""Text to token ids."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may say about a trace that does not say it itself."""

    block_size: int | None = None
    """Tokens a block."""
    tokenizer: Tokenizer | None = None


@dataclass(slots=True)
class Counted:
    """The index of the next request, and the ids given so far."""

    next_index: int = 0
    ids: BlockIds = field(default_factory=BlockIds)


class Format(ABC):
    """Turns the records of one trace into requests; it is made anew for every reading.

    ``convert`` uses a record whole or, raising ``BadRecord``, not at all; block ids that it has
    taken by then are lost, which costs nothing.
    """

    name: ClassVar[str]
    has_whole_sessions: ClassVar[bool] = False
    """Whether no session goes on after another one has begun."""

    def __init__(self, head: Sequence[object], options: Options) -> None:
        """``head`` are the first records that can be read, one at least."""
        self.counted = Counted()

    @staticmethod
    @abstractmethod
    def recognises(head: Sequence[object]) -> bool:
        """Whether a trace that starts with these records has this format."""

    @abstractmethod
    def info(self) -> TraceInfo:
        """What is known of the whole trace from its first records."""

    @abstractmethod
    def convert(self, record: object) -> list[TraceRequest]:
        """Return the requests of one record; ``BadRecord`` where it is malformed."""


def has(record: object, *names: str) -> bool:
    """Whether a record is an object with these fields."""
    return isinstance(record, dict) and all(name in record for name in names)


def hashed_blocks(
    chain: Chain, ids: BlockIds, hashes: list[object], num_tokens: int, block_size: int
) -> "array[int]":
    """Return the ids of all blocks of an input, of which the trace hashed all or the full ones.

    A last, partial block without a hash is like no other.
    """
    num_full, rest = divmod(num_tokens, block_size)
    num_blocks = num_full + (rest > 0)
    if len(hashes) not in (num_full, num_blocks):
        what = f"{num_tokens} tokens are {num_blocks} blocks of {block_size}"
        raise BadRecord(f"hash_ids: {what}, found {len(hashes)}")
    blocks = chain.chained(hashes)
    if len(hashes) < num_blocks:
        blocks.extend(ids.fresh(1))
    return blocks


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-num_tokens // block_size)
