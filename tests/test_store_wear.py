"""Bytes written in a day: what counts, and for how long."""

from hypothesis import given
from hypothesis import strategies as st

from hicache.store.wear import DAY_S, SLOT_S, Wear


def test_what_was_written_counts_for_a_day() -> None:
    wear = Wear(None)
    wear.take([30], now=1000.0)
    wear.take([12], now=1000.0 + DAY_S / 2)

    assert wear.last_day_nbytes(1000.0 + DAY_S - SLOT_S) == 42
    assert wear.last_day_nbytes(1000.0 + DAY_S + SLOT_S) == 12
    assert wear.last_day_nbytes(1000.0 + 2 * DAY_S) == 0


def test_the_first_records_of_a_batch_are_taken_until_the_day_is_full() -> None:
    wear = Wear(100)

    assert wear.take([40, 40, 40], now=0.0) == 2
    assert wear.take([40], now=10.0) == 0
    assert wear.take([20], now=20.0) == 1
    assert wear.take([40], now=DAY_S + SLOT_S) == 1


def test_what_was_not_written_after_all_is_given_back() -> None:
    wear = Wear(100)
    wear.take([100], now=0.0)

    wear.give_back(60, now=1.0)

    assert wear.take([60], now=2.0) == 1


def test_what_was_there_before_counts_if_it_is_younger_than_a_day() -> None:
    wear = Wear(100)

    wear.found(60, written=-DAY_S - 1, now=0.0)
    wear.found(50, written=-DAY_S / 2, now=0.0)
    wear.found(10, written=-DAY_S / 3, now=0.0)
    wear.found(10, written=-DAY_S / 2, now=0.0)

    assert wear.last_day_nbytes(0.0) == 70
    assert wear.take([40], now=0.0) == 0
    assert wear.last_day_nbytes(DAY_S * 0.6) == 10


@given(st.lists(st.tuples(st.floats(0, DAY_S / 3), st.integers(1, 50))))
def test_no_day_has_more_than_its_limit(writes: list[tuple[float, int]]) -> None:
    wear, now, written = Wear(100), 0.0, [(0.0, 0)]
    for pause_s, nbytes in writes:
        now += pause_s
        if wear.take([nbytes], now):
            written.append((now, nbytes))
        wear.check()

    for end, _ in written:
        assert sum(n for at, n in written if end - DAY_S + SLOT_S < at <= end) <= 100
