"""The index arrays that kernels read, against a model of them that is too simple to be wrong."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.engine.attention import Span
from hicache.engine.page_tables import padded, page_table, written_rows


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[Span]]:
    """Sequences that share pages of their prefixes at most, and no page that is written."""
    page_size = draw(st.sampled_from([1, 3, 8, 64]))
    starts = st.integers(0, 4 * page_size)
    lengths = draw(st.lists(st.tuples(starts, st.integers(1, 40)), min_size=1, max_size=5))
    free = list(range(400))
    random.Random(draw(st.integers(0, 99))).shuffle(free)
    shared = [free.pop() for _ in range(4)]
    spans: list[Span] = []
    for start, count in lengths:
        num_pages = -(-(start + count) // page_size) + count % 3  # some more than it needs
        num_shared = min(start // page_size, draw(st.integers(0, 4)))
        own = [free.pop() for _ in range(num_pages - num_shared)]
        spans.append(Span(count, start, np.array([*shared[:num_shared], *own], dtype=np.int64)))
    return page_size, spans


@settings(max_examples=50)
@given(batches())
def test_page_tables_say_what_a_list_of_lists_would(batch: tuple[int, list[Span]]) -> None:
    page_size, spans = batch

    table = page_table(spans, page_size)

    arrays = (table.query_indptr, table.indptr, table.indices, table.last_page_len)
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
    assert table.num_sequences == len(spans)
    assert table.is_decode == all(span.num_tokens == 1 for span in spans)
    for indptr, total in (
        (table.query_indptr, sum(span.num_tokens for span in spans)),
        (table.indptr, len(table.indices)),
    ):
        assert len(indptr) == len(spans) + 1
        assert (indptr[0], indptr[-1]) == (0, total)
        assert (np.diff(indptr) > 0).all()
    for index, span in enumerate(spans):
        own = table.indices[table.indptr[index] : table.indptr[index + 1]].tolist()
        last = int(table.last_page_len[index])
        rows = [(slot, offset) for slot in own[:-1] for offset in range(page_size)]
        rows += [(own[-1], offset) for offset in range(last)]
        assert 1 <= last <= page_size
        # One row of one page for each token, in order, and nothing behind the last new token.
        assert rows == [
            (int(span.slots[position // page_size]), position % page_size)
            for position in range(span.start + span.num_tokens)
        ]
        count = int(table.query_indptr[index + 1] - table.query_indptr[index])
        assert count == span.num_tokens


@settings(max_examples=50)
@given(batches(), st.integers(1, 4))
def test_new_tokens_are_written_behind_those_that_are_there_and_nowhere_else(
    batch: tuple[int, list[Span]], num_layers: int
) -> None:
    page_size, spans = batch
    page_rows = num_layers * 2 * page_size

    rows = written_rows(spans, page_size, page_rows)

    assert rows.dtype == np.int64
    expected = [
        int(span.slots[position // page_size]) * page_rows + position % page_size
        for span in spans
        for position in range(span.start, span.start + span.num_tokens)
    ]
    assert rows.tolist() == expected
    writers: dict[int, set[int]] = {}
    number = [index for index, span in enumerate(spans) for _ in range(span.num_tokens)]
    for row, writer in zip(rows.tolist(), number, strict=True):
        writers.setdefault(row // page_rows, set()).add(writer)
        assert row % page_rows < page_size  # a key of layer 0
    assert all(len(found) == 1 for found in writers.values())


@settings(max_examples=50)
@given(batches(), st.integers(0, 9))
def test_what_fills_up_a_batch_is_its_shortest_sequence_again(
    batch: tuple[int, list[Span]], num_more: int
) -> None:
    page_size, spans = batch

    full = padded(spans, len(spans) + num_more)

    assert full.spans[: len(spans)] == spans
    assert full.sources[: len(spans)].tolist() == list(range(len(spans)))
    assert len(full.spans) == len(full.sources) == len(spans) + num_more
    assert all(span is spans[source] for span, source in zip(full.spans, full.sources, strict=True))
    shortest = min(span.start for span in spans)
    assert all(span.start == shortest for span in full.spans[len(spans) :])
    # A row that is there twice is written twice with the same token's values.
    if all(span.num_tokens == 1 for span in spans):
        rows = written_rows(full.spans, page_size, 2 * page_size).tolist()
        assert len(set(zip(rows, full.sources.tolist(), strict=True))) == len(set(rows))


def test_a_batch_that_is_too_large_for_its_graph_is_a_bug_that_is_caught() -> None:
    spans = [Span(1, 0, np.array([slot])) for slot in range(3)]

    with pytest.raises(AssertionError):
        padded(spans, 2)
