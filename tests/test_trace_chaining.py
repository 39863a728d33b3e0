"""Chained block ids, against a dict of whole prefixes."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.tools.traces.chaining import BlockIds, Chain
from hicache.tools.traces.errors import BadRecord
from tests.trace_files import unique_prefixes

HASHES = st.one_of(
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(-(2**70), 2**70),
    st.sampled_from(["a", "b", 65536 * 3, 2**31]),
)
SEQUENCES = st.lists(st.lists(HASHES, max_size=12), max_size=12)


@given(SEQUENCES)
def test_ids_are_equal_where_all_hashes_up_to_there_are(sequences: list[list[object]]) -> None:
    ids = BlockIds()
    chain = Chain(ids)
    known: dict[tuple[object, ...], int] = {}

    for hashes in sequences:
        for end, found in enumerate(chain.chained(hashes), start=1):
            expected = known.setdefault(tuple(hashes[:end]), found)
            assert found == expected

    assert len(set(known.values())) == len(known) == unique_prefixes(sequences)


@given(st.lists(st.lists(st.integers(0, 3), max_size=300), max_size=4))
def test_long_runs_of_few_hashes_are_chained_too(sequences: list[list[int]]) -> None:
    chain = Chain(BlockIds())

    found = [chain.chained(hashes) for hashes in sequences]

    assert len({id_ for row in found for id_ in row}) == unique_prefixes(sequences)


def test_ids_count_up_as_blocks_are_first_seen() -> None:
    chain = Chain(BlockIds())

    assert chain.chained([10, 11, 12]) == array("i", [0, 1, 2])
    assert chain.chained([10, 11, 5]) == array("i", [0, 1, 3])
    assert chain.chained([12, 5]) == array("i", [4, 5])
    assert chain.chained([]) == array("i")


@given(SEQUENCES, SEQUENCES)
def test_scopes_have_no_id_in_common(one: list[list[object]], other: list[list[object]]) -> None:
    ids = BlockIds()
    chains = Chain(ids), Chain(ids)
    seen: tuple[set[int], set[int]] = (set(), set())

    for a, b in zip(one, other, strict=False):
        seen[0].update(chains[0].chained(a), ids.fresh(1))
        seen[1].update(chains[1].chained(b))

    assert not seen[0] & seen[1]


@pytest.mark.parametrize("wrong", [1.5, None, True, [1]])
def test_what_is_no_hash_is_refused(wrong: object) -> None:
    chain = Chain(BlockIds())

    with pytest.raises(BadRecord, match="is no block id"):
        chain.chained(["a", wrong])

    assert chain.chained(["a", "b"]) == array("i", [0, 1])
