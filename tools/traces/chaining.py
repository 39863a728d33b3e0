"""Block ids that name a whole prefix, from ids that may name only a block.

Some traces hash each block with all before it, some hash each alone, some count from 1 in every
session. Here they all become ids that are global within the trace and chained. It costs array
operations for what was seen before, and 12 bytes a new block; only where a block follows another
one than before (a hash of the block alone) is there a step in Python.
"""

from array import array
from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from hicache.errors import InputError
from hicache.tools.traces.errors import BadRecord

Ids = npt.NDArray[np.int32]

ROOT = -1
NONE = -1
FRESH = -2
"""The predecessor of a block that nothing else can be."""
MAX_BLOCKS = 2**31 - 1
SMALL_WINDOW = 64
"""Blocks looked at behind one that was not as expected: else many such would cost a square."""


class Table:
    """An array of int32 that grows; what was never written is ``NONE``."""

    def __init__(self) -> None:
        self.values: Ids = np.full(1024, NONE, np.int32)

    def reach(self, size: int) -> None:
        """Make room for ``size`` values; amortised O(1) a value."""
        if size > len(self.values):
            grown = np.full(max(size, len(self.values) * 3 // 2), NONE, np.int32)
            grown[: len(self.values)] = self.values
            self.values = grown


class BlockIds:
    """Gives ids, and knows of each which one it follows."""

    def __init__(self) -> None:
        self.num_given = 0
        self._parents = Table()

    def fresh(self, num_blocks: int) -> "array[int]":
        """Return ids of blocks that no other request has."""
        return as_array(self.give(np.full(num_blocks, FRESH, np.int32)))

    def give(self, parents: Ids) -> Ids:
        """Return a new id for a block after each of ``parents``."""
        start = self.num_given
        if start + len(parents) > MAX_BLOCKS:
            raise InputError(f"the trace has more than {MAX_BLOCKS} different blocks")
        self.num_given += len(parents)
        self._parents.reach(self.num_given)
        self._parents.values[start : self.num_given] = parents
        return np.arange(start, self.num_given, dtype=np.int32)

    def parents(self, ids: Ids) -> Ids:
        """Return which id each of ``ids`` follows; a negative id follows nothing."""
        return np.where(ids < 0, FRESH, self._parents.values[ids])


class Chain:
    """The blocks of one scope of hashes: a trace, or a session that has its own."""

    def __init__(self, ids: BlockIds) -> None:
        self._ids = ids
        self._first = Table()
        """By the code of a hash: the id that it had when it was first seen."""
        self._others: dict[tuple[int, int], int] = {}
        """By (id before, code): the ids of hashes that have followed something else."""
        self._codes: dict[Hashable, int] | None = None
        """Small whole numbers are their own codes; anything else gets one."""
        self._num_codes = 0

    def chained(self, hashes: Sequence[object]) -> "array[int]":
        """Return the id of each block; equal to an earlier one where all before are equal too."""
        if not hashes:
            return array("i")
        codes = self._coded(hashes)
        ids = np.empty(len(codes), np.int32)
        position, before, window = 0, ROOT, len(codes)
        while position < len(codes):
            run = self._run(before, codes[position : position + window])
            ids[position : position + len(run)] = run
            position, before = position + len(run), int(run[-1])
            window = max(SMALL_WINDOW, 2 * len(run))
        return as_array(ids)

    def _run(self, before: int, codes: Ids) -> Ids:
        """Return the ids of some first blocks after ``before``: all known, all new, or one."""
        found = self._first.values[codes]
        previous = np.concatenate((np.array([before], np.int32), found[:-1]))
        if num_known := _num_leading(self._ids.parents(found) == previous):
            return found[:num_known]
        new = codes[: _num_leading(found == NONE)]
        if len(new) > 1 and len(np.unique(new)) == len(new):
            given = self._ids.num_given
            parents = np.arange(given - 1, given - 1 + len(new), dtype=np.int32)
            parents[0] = before
            self._first.values[new] = ids = self._ids.give(parents)
            return ids
        return np.array([self._step(before, int(codes[0]))], np.int32)

    def _step(self, before: int, code: int) -> int:
        """Return the id of a block that is new, or follows another one than at first."""
        first = int(self._first.values[code])
        if first == NONE:
            self._first.values[code] = first = self._new(before)
            return first
        other = self._others.get((before, code))
        if other is None:
            other = self._others[before, code] = self._new(before)
        return other

    def _new(self, before: int) -> int:
        return int(self._ids.give(np.array([before], np.int32))[0])

    def _coded(self, hashes: Sequence[object]) -> Ids:
        numbers = _numbers(hashes) if self._codes is None else None
        if numbers is not None:
            top, size = int(numbers.max()) + 1, self._num_codes
            # A table as large as the largest hash is right only where few numbers are left out.
            if numbers.min() >= 0 and top <= 4 * (size + len(numbers)) + 65536:
                self._num_codes = max(size, top)
                self._first.reach(self._num_codes)
                return numbers.astype(np.int32)
        if self._codes is None:
            seen = np.flatnonzero(self._first.values[: self._num_codes] != NONE)
            self._codes = {int(number): int(number) for number in seen}
        codes = self._codes
        coded = np.empty(len(hashes), np.int32)
        for index, value in enumerate(hashes):
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise BadRecord(f"hash_ids: {value!r:.40} is no block id")
            coded[index] = code = codes.setdefault(value, self._num_codes)
            self._num_codes += code == self._num_codes
        self._first.reach(self._num_codes)
        return coded


def as_array(ids: Ids) -> "array[int]":
    """Return ids as a request has them."""
    result = array("i")
    result.frombytes(ids.astype(np.int32, copy=False).tobytes())
    return result


def _num_leading(is_so: npt.NDArray[np.bool_]) -> int:
    return len(is_so) if is_so.all() else int(is_so.argmin())


def _numbers(hashes: Sequence[object]) -> npt.NDArray[np.int64] | None:
    try:
        return np.frombuffer(array("q", cast("Sequence[int]", hashes)), np.int64)
    except (TypeError, OverflowError):
        return None
