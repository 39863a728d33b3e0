"""A ledger of the store, and calls that a test completes by hand."""

import threading

from hicache.events import OpId
from hicache.store.ledger import Ledger
from hicache.store.operations import Call, Kind, Operation
from tests.stores import page_refs, slots

NOW = 100.0
DEADLINE_S = 5.0


def ledger(
    num_pages: int = 1024, *, max_batch: int = 8, max_calls: int = 2, max_queued: int = 64
) -> Ledger:
    return Ledger(
        num_pages,
        max_batch=max_batch,
        max_calls=max_calls,
        max_queued=max_queued,
        deadline_s=DEADLINE_S,
        clock=lambda: NOW,
        wake=threading.Event(),
    )


def operation(kind: Kind, num_keys: int, op: int | None, *, first: int = 0) -> Operation:
    pages = page_refs(num_keys)
    lent = slots(*range(first, first + num_keys)) if kind in ("fetch", "store") else slots()
    keys = [page.key for page in pages]
    return Operation(kind, keys, None if op is None else OpId(op), pages=pages, slots=lent)


def take(books: Ledger) -> Call:
    call = books.take(NOW)
    books.check()
    assert call is not None
    return call


def finish(books: Ledger, call: Call, *, is_good: bool = True) -> None:
    books.finish(call, [is_good] * call.num_keys, "failed")
    books.check()
