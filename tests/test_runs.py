"""Stretches of pages that one copy moves."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hicache.transfer.runs import Run, pieces, runs

SLOTS = st.lists(st.integers(0, 12), max_size=20)
PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=20)


def test_neighbours_on_both_sides_are_one_run() -> None:
    assert list(runs([4, 5, 6], [0, 1, 2])) == [Run(4, 0, 3)]


def test_neighbours_on_one_side_only_are_not() -> None:
    assert list(runs([4, 5], [1, 0])) == [Run(4, 1, 1), Run(5, 0, 1)]


def test_descending_slots_are_not_merged() -> None:
    assert list(runs([5, 4], [5, 4])) == [Run(5, 5, 1), Run(4, 4, 1)]


def test_a_piece_crosses_no_chunk() -> None:
    cut = list(pieces(iter([Run(3, 6, 6)]), 100, source_chunk=4, target_chunk=8))

    assert cut == [Run(3, 6, 1), Run(4, 7, 1), Run(5, 8, 3), Run(8, 11, 1)]


@given(PAIRS)
def test_runs_are_the_pairs_in_order_and_maximal(pairs: list[tuple[int, int]]) -> None:
    found = list(runs([source for source, _ in pairs], [target for _, target in pairs]))

    assert expand(found) == pairs
    assert all(run.length > 0 for run in found)
    for run, following in pairwise(found):
        assert (run.source + run.length, run.target + run.length) != following[:2]


@given(PAIRS, st.integers(1, 5), st.integers(0, 5), st.integers(0, 5))
def test_pieces_are_the_same_pairs_within_bounds(
    pairs: list[tuple[int, int]], max_length: int, source_chunk: int, target_chunk: int
) -> None:
    whole = list(runs([source for source, _ in pairs], [target for _, target in pairs]))

    cut = list(pieces(iter(whole), max_length, source_chunk, target_chunk))

    assert expand(cut) == pairs
    for source, target, length in cut:
        assert 0 < length <= max_length
        assert not source_chunk or source // source_chunk == (source + length - 1) // source_chunk
        assert not target_chunk or target // target_chunk == (target + length - 1) // target_chunk


def expand(found: list[Run]) -> list[tuple[int, int]]:
    return [(source + i, target + i) for source, target, length in found for i in range(length)]
