"""Request traces of loads that people ask about and have no trace of; equal seeds, equal traces.

It knows when sessions start and how pieces of text become blocks; what a session says is
``workloads``' to know.
"""

import gzip
import heapq
import io
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from hicache.errors import InputError
from hicache.tools.traces.normal import TraceInfo, TraceRequest
from hicache.tools.traces.normal_form import written
from hicache.tools.traces.shapes import KINDS, Shape
from hicache.tools.traces.workloads import Piece, Turn, turns

Arrivals = Literal["poisson", "even"]


@dataclass(frozen=True, slots=True)
class Load:
    """What to generate."""

    shape: Shape
    sessions: int = 100
    seed: int = 0
    rate: float = 1.0
    """Sessions that start a second."""
    arrivals: Arrivals = "poisson"
    block_size: int = 64

    @property
    def info(self) -> TraceInfo:
        """What its trace says of itself."""
        kind = next(name for name, shape in KINDS.items() if shape is type(self.shape))
        note = (
            f"generated: {self.sessions} sessions, seed {self.seed}, {self.arrivals} arrivals"
            f" of {self.rate:g} a second"
        )
        return TraceInfo(kind, self.block_size, has_times=True, has_blocks=True, note=note)


def generate(load: Load) -> Iterator[TraceRequest]:
    """Give the requests in the order of their times.

    Holds the sessions that are going on, and an id for each different block.
    """
    blocks = Blocks(load.block_size)
    indices: dict[tuple[int, int], int] = {}
    for index, (time_s, session, number, turn) in enumerate(_in_order(load)):
        parent = None if turn.parent is None else indices[session, turn.parent]
        indices[session, number] = index
        yield TraceRequest(
            time_s=round(time_s, 6),
            session=str(session),
            tenant="",
            num_input_tokens=sum(piece.num_tokens for piece in turn.pieces),
            num_output_tokens=turn.num_output_tokens,
            blocks=blocks.of(turn.pieces),
            parent=parent,
        )


def _starts(load: Load) -> Iterator[float]:
    random, time_s = Random(f"{load.seed}/arrivals"), 0.0
    for _ in range(load.sessions):
        yield time_s
        is_even = load.arrivals == "even"
        time_s += 1 / load.rate if is_even else random.expovariate(load.rate)


def _in_order(load: Load) -> Iterator[tuple[float, int, int, Turn]]:
    waiting: list[tuple[float, int, int, Turn]] = []
    for session, start_s in enumerate(_starts(load)):
        while waiting and waiting[0][0] <= start_s:
            yield heapq.heappop(waiting)
        for number, turn in enumerate(turns(load.shape, load.seed, session)):
            heapq.heappush(waiting, (start_s + turn.time_s, session, number, turn))
    while waiting:
        yield heapq.heappop(waiting)


class Blocks:
    """Ids of blocks by the pieces that they and all blocks before them are made of."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ids: dict[tuple[object, ...], int] = {}

    def of(self, pieces: Sequence[Piece]) -> "array[int]":
        """Return the id of each block of an input, the last, partial one included."""
        found = array("i")
        before, free, parts = -1, self._block_size, []
        for piece in pieces:
            offset = 0
            while offset < piece.num_tokens:
                taken = min(free, piece.num_tokens - offset)
                parts.append((piece.name, offset, taken))
                offset, free = offset + taken, free - taken
                if not free:
                    before = self._id(before, parts)
                    found.append(before)
                    free, parts = self._block_size, []
        if parts:
            found.append(self._id(before, parts))
        return found

    def _id(self, before: int, parts: list[tuple[tuple[int | str, ...], int, int]]) -> int:
        return self._ids.setdefault((before, *parts), len(self._ids))


def write(path: Path | None, info: TraceInfo, requests: Iterable[TraceRequest]) -> None:
    """Write a trace to a file, compressed where it is named .gz, or to stdout.

    ``InputError`` if it cannot be written. The same requests give the same bytes.
    """
    lines = written(info, requests)
    if path is None:
        sys.stdout.buffer.writelines(lines)
        sys.stdout.buffer.flush()
        return
    try:
        with path.open("wb") as raw:
            if path.suffix != ".gz":
                raw.writelines(lines)
                return
            # Neither the time nor the name of the file is written into it.
            packed = gzip.GzipFile("", "wb", 6, raw, mtime=0)
            with io.BufferedWriter(packed) as buffered:
                buffered.writelines(lines)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
