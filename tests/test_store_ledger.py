"""The book-keeping of the store, with calls completed by hand."""

import threading
from collections.abc import Callable

import pytest

from hicache.events import Event, Finished, OpId, Probed
from hicache.keys import PageKey
from hicache.store.ledger import Ledger
from hicache.store.operations import AWAITED, KINDS, MISSED, Kind, Operation
from tests.ledgers import NOW, finish, ledger, operation, take

# ---------------------------------------------------------------- operations and batches


def test_an_operation_without_keys_ends_at_once() -> None:
    books = ledger()

    assert not books.submit(operation("fetch", 0, 1))

    assert books.drain() == [Finished(OpId(1), ())]
    assert books.take(NOW) is None


def test_a_large_operation_becomes_several_calls_and_one_event() -> None:
    books = ledger(max_calls=3)
    books.submit(operation("fetch", 20, 1))

    calls = [take(books), take(books), take(books)]

    assert [call.num_keys for call in calls] == [8, 8, 4]
    assert [slot for call in calls for slot in call.slots] == list(range(20))
    finish(books, calls[2])
    finish(books, calls[0], is_good=False)
    assert books.drain() == []
    finish(books, calls[1])
    assert books.drain() == [Finished(OpId(1), (False,) * 8 + (True,) * 12)]


def test_small_operations_share_a_call() -> None:
    books = ledger(max_calls=1)
    books.submit(operation("fetch", 1, 9, first=90))
    first = take(books)
    for number in range(3):
        books.submit(operation("fetch", 3, number, first=10 * number))
    assert books.take(NOW) is None

    finish(books, first)
    call = take(books)

    assert call.slots == [0, 1, 2, 10, 11, 12, 20, 21]
    books.finish(call, [True] * 4 + [False] * 4, "failed")
    done = [Finished(OpId(0), (True,) * 3), Finished(OpId(1), (True, False, False))]
    assert books.drain() == [Finished(OpId(9), (True,)), *done]
    assert take(books).slots == [22]


def test_kinds_do_not_share_a_call() -> None:
    books = ledger(max_calls=4)
    books.submit(operation("store", 2, 1))
    books.submit(operation("describe", 1, None))
    books.submit(operation("describe", 1, None))
    books.submit(operation("touch", 2, None))

    kinds = [take(books).kind for _ in range(4)]

    assert kinds == ["store", "describe", "describe", "touch"]


def test_probes_go_before_fetches_and_reads_do_not_wait_behind_writes() -> None:
    books = ledger(max_calls=2)
    for number in range(3):
        books.submit(operation("store", 8, number, first=10 * number))
    books.submit(operation("fetch", 8, 10, first=100))
    books.submit(operation("probe", 8, 11))

    kinds = [take(books).kind for _ in range(4)]

    assert kinds == ["probe", "fetch", "store", "store"]
    assert books.take(NOW) is None


def test_a_delete_runs_alone_among_writes() -> None:
    books = ledger(max_calls=4)
    books.submit(operation("store", 1, 1))
    books.submit(operation("delete", 1, None))
    books.submit(operation("store", 1, 2, first=5))

    store = take(books)
    assert books.take(NOW) is None
    finish(books, store)
    delete = take(books)
    assert (delete.kind, books.take(NOW)) == ("delete", None)
    finish(books, delete)

    assert take(books).slots == [5]


def test_a_delete_does_not_wait_for_a_store_that_was_given_up() -> None:
    books = ledger(max_calls=4)
    books.submit(operation("store", 1, 1))
    books.submit(operation("delete", 1, None))

    assert books.give_up(take(books))

    assert take(books).kind == "delete"


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("kind", AWAITED)
def test_what_the_queue_has_no_room_for_fails_and_is_counted(kind: Kind) -> None:
    books = ledger(max_queued=10)
    books.submit(operation(kind, 7, 1))
    books.submit(operation(kind, 7, 2, first=20))
    assert not books.submit(operation(kind, 7, 3, first=40))

    assert books.num_queued == {kind: 10}
    assert books.num_dropped == {(kind, "queue_full"): 4 + 7}
    over = books.drain()
    assert [getattr(event, "op", None) for event in over] == [3]
    finish(books, take(books))
    finish(books, take(books))
    ended = books.drain()[-1]
    expected = (True, True, True, False, False, False, False)
    assert ended == (Probed(OpId(2), expected) if kind == "probe" else Finished(OpId(2), expected))


def test_deletes_are_not_dropped_where_stores_would_be() -> None:
    books = ledger(max_queued=1)

    books.submit(operation("delete", 100, None))

    assert books.num_queued == {"delete": 100}


def test_a_lane_never_holds_more_than_its_share_of_the_pool() -> None:
    books = ledger(num_pages=160, max_calls=100)
    books.submit(operation("fetch", 30, 1))
    books.submit(operation("store", 30, 2, first=100))

    calls = [take(books), take(books), take(books)]

    assert [call.num_keys for call in calls] == [8, 7, 5]
    assert books.num_lent == 20 == 160 // 8
    assert books.take(NOW) is None
    finish(books, calls[0])
    assert take(books).num_keys == 8


def test_a_tiny_pool_lends_a_page_at_a_time() -> None:
    books = ledger(num_pages=3)
    books.submit(operation("fetch", 3, 1))

    assert take(books).num_keys == 1
    assert books.take(NOW) is None


# ---------------------------------------------------------------- waiting


def test_waiting_for_writes_ends_when_they_have() -> None:
    books = ledger()
    books.submit(operation("store", 1, 1))
    call = take(books)
    assert not books.wait_for_writes(0)
    waiter = threading.Thread(target=books.wait_for_writes, args=(20,))
    waiter.start()

    finish(books, call)
    waiter.join(20)

    assert not waiter.is_alive()


def test_waiting_for_writes_does_not_wait_for_what_is_paused() -> None:
    books = ledger()
    books.submit(operation("delete", 1, None))
    assert not books.wait_for_writes(0)

    books.pause()

    assert books.wait_for_writes(0)


def test_reads_are_no_writes() -> None:
    books = ledger()

    books.submit(operation("fetch", 1, 1))

    assert books.wait_for_writes(0)


def test_wake_is_set_by_every_event() -> None:
    wake = threading.Event()
    books = Ledger(
        16, max_batch=1, max_calls=1, max_queued=1, deadline_s=1, clock=lambda: NOW, wake=wake
    )
    events: list[Event] = [Probed(OpId(1), ())]

    books.emit(events[0])

    assert wake.is_set()
    assert books.drain() == events
    assert books.drain() == []


def test_an_operation_says_how_long_it_took_by_the_clock_that_is_given() -> None:
    now = NOW
    books = Ledger(
        64, max_batch=8, max_calls=1, max_queued=8, deadline_s=1, clock=lambda: now,
        wake=threading.Event(),
    )  # fmt: skip
    books.submit(operation("fetch", 1, 1))
    call = take(books)

    now += 3.5
    finish(books, call)

    [event] = books.drain()
    assert isinstance(event, Finished)
    assert event.seconds == 3.5


def test_what_is_not_there_is_a_miss_and_nothing_that_was_dropped() -> None:
    books = ledger()
    kinds: tuple[Kind, ...] = ("probe", "fetch")
    for number, kind in enumerate(kinds, start=1):
        books.submit(operation(kind, 4, number))
        books.finish(take(books), [True, False, False, True], MISSED)

    assert books.num_missed == {"probe": 2, "fetch": 2}
    assert books.num_dropped == {}


# ---------------------------------------------------------------- check() finds what is wrong


def test_check_finds_a_page_lent_twice() -> None:
    books = ledger()
    books.submit(operation("fetch", 2, 1, first=5))
    books.submit(operation("store", 2, 2, first=6))
    books.take(NOW)
    books.take(NOW)

    with pytest.raises(AssertionError):
        books.check()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda op: setattr(op, "num_resolved", 1),
        lambda op: setattr(op, "stop", 1),
        lambda op: op.outcomes.pop(),
    ],
    ids=["resolved twice", "fallen from the queue", "without an outcome"],
)
def test_check_finds_keys_that_got_lost(spoil: Callable[[Operation], None]) -> None:
    books = ledger()
    spoiled = operation("fetch", 2, 1)
    books.submit(spoiled)

    spoil(spoiled)

    with pytest.raises(AssertionError):
        books.check()


def test_every_kind_has_keys() -> None:
    assert {*KINDS} == {"probe", "fetch", "store", "delete", "touch", "describe"}
    assert Operation("touch", [PageKey(bytes(32))]).num_queued == 0
