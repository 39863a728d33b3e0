"""Stretches of pages that are neighbours in both pools, so that one copy moves them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """``length`` pages from slot ``source`` on, to slot ``target`` and on."""

    source: int
    target: int
    length: int


def runs(source: Sequence[int], target: Sequence[int]) -> Iterator[Run]:
    """Yield the maximal stretches that ascend slot by slot on both sides, in order."""
    assert len(source) == len(target)
    if not source:
        return
    first_source, first_target, length = source[0], target[0], 0
    for from_slot, to_slot in zip(source, target, strict=True):
        if from_slot != first_source + length or to_slot != first_target + length:
            yield Run(first_source, first_target, length)
            first_source, first_target, length = from_slot, to_slot, 0
        length += 1
    yield Run(first_source, first_target, length)


def pieces(
    whole: Iterator[Run], max_length: int, source_chunk: int = 0, target_chunk: int = 0
) -> Iterator[Run]:
    """Yield the runs cut into pieces of at most ``max_length`` pages.

    A piece crosses no multiple of ``source_chunk`` or ``target_chunk`` slots in its pool; 0 is a
    pool in one piece.
    """
    assert max_length > 0
    is_chunked = bool(source_chunk or target_chunk)
    for run in whole:
        source, target, length = run
        if length <= max_length and not is_chunked:
            yield run
            continue
        done = 0
        while done < length:
            taken = min(max_length, length - done)
            if source_chunk:
                taken = min(taken, source_chunk - (source + done) % source_chunk)
            if target_chunk:
                taken = min(taken, target_chunk - (target + done) % target_chunk)
            yield Run(source + done, target + done, taken)
            done += taken
