"""How operations end before their time, with calls completed by hand."""

from hicache.events import Finished, OpId, Probed, Returned
from hicache.store.ledger import Ledger
from hicache.store.operations import AWAITED, Call
from tests.ledgers import DEADLINE_S, NOW, finish, ledger, operation, take

# ---------------------------------------------------------------- deadlines


def overdue(books: Ledger) -> list[Call]:
    return books.overdue(NOW + DEADLINE_S)


def test_a_deadline_ends_the_waiting_and_the_return_ends_the_ownership() -> None:
    books = ledger()
    books.submit(operation("fetch", 3, 1))
    call = take(books)
    assert books.overdue(NOW + DEADLINE_S - 0.1) == []
    assert overdue(books) == [call]

    assert books.give_up(call)
    assert not books.give_up(call)

    assert overdue(books) == []
    assert books.drain() == [Finished(OpId(1), (False,) * 3, is_returned=False)]
    assert (books.num_lent, books.num_overdue) == (3, 3)
    finish(books, call)
    assert books.drain() == [Returned(OpId(1))]
    assert (books.num_lent, books.num_overdue) == (0, 0)
    assert not books.give_up(call)


def test_nothing_starts_before_somebody_has_looked_at_what_expired() -> None:
    books = ledger(max_calls=1)
    books.submit(operation("fetch", 8, 1))
    books.submit(operation("fetch", 8, 2, first=10))
    call = take(books)
    assert not books.expire(NOW)

    assert books.expire(NOW + DEADLINE_S)
    assert not books.expire(NOW + DEADLINE_S)

    assert books.take(NOW) is None
    assert books.take_expired() == [call]
    assert take(books).slots[0] == 10


def test_an_operation_keeps_what_came_before_the_deadline() -> None:
    books = ledger()
    books.submit(operation("fetch", 10, 1))
    first, second = take(books), take(books)

    finish(books, first)
    books.give_up(second)

    assert books.drain() == [Finished(OpId(1), (True,) * 8 + (False,) * 2, is_returned=False)]
    finish(books, second)
    assert books.drain() == [Returned(OpId(1))]


def test_a_call_that_returns_before_its_operation_ends_is_no_event() -> None:
    books = ledger()
    books.submit(operation("fetch", 10, 1))
    first, second = take(books), take(books)

    books.give_up(first)
    finish(books, first)
    finish(books, second)

    assert books.drain() == [Finished(OpId(1), (False,) * 8 + (True,) * 2)]


def test_an_operation_has_returned_when_its_last_call_has() -> None:
    books = ledger()
    books.submit(operation("store", 10, 1))
    first, second = take(books), take(books)
    books.give_up(first)
    books.give_up(second)
    assert books.drain() == [Finished(OpId(1), (False,) * 10, is_returned=False)]

    finish(books, second)
    assert books.drain() == []
    finish(books, first)

    assert books.drain() == [Returned(OpId(1))]


def test_a_probe_that_is_given_up_holds_nothing() -> None:
    books = ledger()
    books.submit(operation("probe", 2, 1))
    call = take(books)

    books.give_up(call)
    finish(books, call)

    assert books.drain() == [Probed(OpId(1), (False, False))]


def test_a_delete_that_is_given_up_is_nobodys_event() -> None:
    books = ledger()
    books.submit(operation("delete", 2, None))
    call = take(books)

    books.give_up(call)
    finish(books, call)

    assert books.drain() == []
    assert books.wait_for_writes(0)


def test_overdue_calls_make_room_for_others_until_the_lane_has_lent_its_share() -> None:
    books = ledger(num_pages=160, max_calls=1)
    books.submit(operation("fetch", 8, 1))
    books.submit(operation("fetch", 8, 2, first=10))
    books.submit(operation("fetch", 8, 3, first=20))
    first = take(books)

    books.give_up(first)
    second = take(books)
    assert second.num_keys == 7
    books.give_up(second)

    assert books.num_overdue == 15
    ended = [event for event in books.drain() if isinstance(event, Finished)]
    assert [(event.op, event.is_returned) for event in ended] == [(1, False), (2, False), (3, True)]
    assert not books.submit(operation("fetch", 1, 4, first=30))
    assert books.drain() == [Finished(OpId(4), (False,))]
    assert books.num_dropped["fetch", "lent"] == 1 + 8 + 1
    assert books.submit(operation("store", 1, 5, first=30))
    assert books.submit(operation("probe", 1, 6))


def test_a_lane_takes_in_again_when_its_overdue_pages_have_returned() -> None:
    books = ledger(num_pages=16)
    books.submit(operation("store", 1, 1))
    call = take(books)
    books.give_up(call)
    assert not books.submit(operation("store", 1, 2, first=5))

    finish(books, call)

    assert books.submit(operation("store", 1, 3, first=5))


# ---------------------------------------------------------------- cancel, refuse, pause


def test_cancel_drops_what_has_not_begun() -> None:
    books = ledger(max_calls=1)
    books.submit(operation("fetch", 20, 1))
    call = take(books)

    books.cancel(OpId(1))
    books.check()
    assert books.drain() == []
    finish(books, call)

    assert books.drain() == [Finished(OpId(1), (True,) * 8 + (False,) * 12)]
    assert books.num_dropped == {("fetch", "cancelled"): 12}
    assert books.take(NOW) is None


def test_cancel_of_what_is_queued_ends_it_and_others_move_up() -> None:
    books = ledger()
    books.submit(operation("fetch", 3, 1))
    books.submit(operation("fetch", 3, 2, first=10))

    books.cancel(OpId(1))
    books.check()

    assert books.drain() == [Finished(OpId(1), (False,) * 3)]
    assert take(books).slots == [10, 11, 12]


def test_a_cancelled_operation_in_mid_queue_is_passed_over() -> None:
    books = ledger()
    for number in range(3):
        books.submit(operation("fetch", 2, number, first=10 * number))

    books.cancel(OpId(1))

    assert take(books).slots == [0, 1, 20, 21]


def test_cancel_of_an_unknown_or_finished_operation_is_harmless() -> None:
    books = ledger()
    books.submit(operation("fetch", 1, 1))
    finish(books, take(books))
    events = books.drain()

    books.cancel(OpId(1))
    books.cancel(OpId(2))

    assert (len(events), books.drain()) == (1, [])


def test_an_overdue_operation_can_be_cancelled() -> None:
    books = ledger()
    books.submit(operation("fetch", 1, 1))
    call = take(books)
    books.give_up(call)

    books.cancel(OpId(1))
    finish(books, call)

    assert books.drain() == [Finished(OpId(1), (False,), is_returned=False), Returned(OpId(1))]


def test_what_is_refused_fails_at_once_whether_queued_or_new() -> None:
    books = ledger(max_calls=1)
    books.submit(operation("store", 10, 1))
    running = take(books)
    books.submit(operation("store", 2, 2, first=20))

    books.refuse(["store"], "full")
    books.submit(operation("store", 2, 3, first=30))

    assert books.drain() == [Finished(OpId(2), (False,) * 2), Finished(OpId(3), (False,) * 2)]
    finish(books, running)
    assert books.drain() == [Finished(OpId(1), (True,) * 8 + (False,) * 2)]
    assert books.num_dropped == {("store", "full"): 2 + 2 + 2}


def test_two_reasons_to_refuse_must_both_go() -> None:
    books = ledger()
    books.refuse(["store"], "full")
    books.refuse(AWAITED, "down")

    books.accept(AWAITED, "down")
    assert not books.submit(operation("store", 1, 1))
    assert books.submit(operation("fetch", 1, 2))
    books.accept(["store"], "full")

    assert books.submit(operation("store", 1, 3, first=5))


def test_while_paused_nothing_starts_and_deletes_are_kept() -> None:
    books = ledger()
    books.submit(operation("delete", 1, None))
    books.pause()

    assert books.take(NOW) is None
    books.resume()

    assert take(books).kind == "delete"
