"""The store over a backend that raises and lies."""

import asyncio
import errno
import logging
from collections.abc import Callable

import pytest

from hicache.errors import CorruptPage, StorageError, StorageUnavailable
from hicache.events import Finished, Returned
from hicache.testing.faulty import Fault, Gate, Method
from tests.stores import NAMESPACE, World, namespace, page_refs

ERRORS: list[BaseException] = [
    StorageError("a backend's own"),
    CorruptPage("told by a backend"),
    OSError(errno.EIO, "input/output error"),
    PermissionError(errno.EACCES, "read-only"),
    KeyError("a bug"),
    MemoryError(),
    asyncio.CancelledError(),
    TimeoutError(),
    SystemExit(1),
    GeneratorExit(),
]
PATIENT = {"breaker_failures": 1000}
"""A breaker that stays closed."""


# ---------------------------------------------------------------- S5: raises


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_s5_whatever_a_call_raises_is_a_failed_call_and_no_more(error: BaseException) -> None:
    pages = page_refs(2)
    methods: tuple[Method, ...] = ("get", "put", "contains", "delete", "touch", "stats", "scan")
    with World(config={**PATIENT, "touch_interval_s": 1}) as world:
        world.store_pages(pages)
        world.backend.always(Fault(error=error), *methods)

        assert world.fetch_pages(pages) == [False] * 2
        assert world.probe_keys([page.key for page in pages]) == [False] * 2
        assert world.store_pages(page_refs(2, first_token=99)) == [False] * 2
        world.store.delete([pages[0].key])
        world.store.describe(namespace())
        world.store.scan(NAMESPACE)
        world.store.touch([pages[0].key])
        world.advance(1)
        name = type(error).__name__
        kinds = ("fetch", "probe", "store", "delete", "describe", "touch", "stats", "scan")
        seen = {f"{kind}_{name}" for kind in kinds}
        world.wait_until(lambda: seen <= world.store.stats().errors.keys())

        world.backend.heal()
        world.reads_and_writes()
        assert world.fetch_pages(pages) == [True] * 2


def test_s5_a_kind_of_failure_is_logged_once_and_counted_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = page_refs(1)
    with World(config=PATIENT) as world:
        world.backend.always(Fault(error=ValueError("it broke")), "get")
        with caplog.at_level(logging.WARNING, "hicache"):
            for _ in range(5):
                world.fetch_pages(pages)

        assert [record.getMessage() for record in caplog.records] == [
            "storage: fetch failed: ValueError: it broke "
            "(further ones of this kind are only counted)"
        ]
        assert world.store.stats().errors == {"fetch_ValueError": 5}
        assert world.store.stats().dropped == {"fetch_failed": 5}


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [
        (StorageError("no"), False),
        (OSError(5, "Input/output error"), False),
        (TimeoutError("slow"), False),
        (ValueError("it broke"), True),
        (AssertionError(), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_only_a_failure_that_nobody_foresees_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture, error: Exception, has_traceback: bool
) -> None:
    with World(config=PATIENT) as world, caplog.at_level(logging.WARNING, "hicache"):
        world.backend.next("get", Fault(error=error))

        world.fetch_pages(page_refs(1))

    [record] = caplog.records
    assert str(error) in record.getMessage()
    assert (record.exc_info is not None) is has_traceback


# ---------------------------------------------------------------- S5: lies


@pytest.mark.parametrize(
    "answer",
    [
        lambda answer: None,
        lambda answer: answer[:-1],
        lambda answer: [*answer, True],
        lambda answer: tuple(answer),
        lambda answer: ["yes"] * len(answer),
        lambda answer: [-1] * len(answer),
        lambda answer: 7,
    ],
    ids=["none", "short", "long", "tuple", "words", "negative", "number"],
)
def test_s5_a_wrong_answer_is_a_failed_call(answer: Callable[[object], object]) -> None:
    pages = page_refs(3)
    fault = Fault(answer=answer)
    with World(config=PATIENT) as world:
        world.store_pages(pages)
        world.backend.always(fault, "get", "put", "contains")

        assert world.fetch_pages(pages) == [False] * 3
        assert world.probe_keys([page.key for page in pages]) == [False] * 3
        assert world.store_pages(page_refs(3, first_token=99)) == [False] * 3

        world.backend.heal()
        world.backend.next("put", fault)
        assert world.store_pages(page_refs(3, first_token=999)) == [False] * 3
        assert world.store.stats().errors == {
            "fetch_WrongAnswer": 1,
            "probe_WrongAnswer": 1,
            "store_WrongAnswer": 2,
        }
        world.reads_and_writes()


def test_s5_a_backend_that_claims_to_have_read_is_not_believed() -> None:
    pages = page_refs(2)
    with World() as world:
        world.store_pages(pages[:1])
        length = 192 + 256
        world.backend.next("get", Fault(answer=lambda answer: [length, length]))

        assert world.fetch_pages(pages) == [True, False]


def test_a_page_that_is_not_accepted_is_not_stored() -> None:
    pages = page_refs(2)
    with World() as world:
        world.backend.next("put", Fault(answer=lambda answer: [True, False]))

        assert world.store_pages(pages) == [True, False]

        assert world.store.stats().num_stored_pages == 1
        assert world.store.stats().dropped == {"store_refused": 1}


# ---------------------------------------------------------------- retries


def let_it_retry(world: World, *, times: int) -> None:
    retries: list[int] = []
    for _ in range(times):
        world.wait_until(lambda: world.store.stats().num_retries > len(retries))
        retries.append(world.store.stats().num_retries)
        world.advance(0.5)


def test_what_is_worth_retrying_is_tried_again() -> None:
    pages = page_refs(2)
    with World() as world:
        world.store_pages(pages)
        gone = Fault(error=StorageUnavailable("connection lost"))
        world.backend.next("get", gone, gone, gone)
        op = world.start_fetch(pages)
        let_it_retry(world, times=3)

        assert world.finished(op).outcomes == (True, True)
        assert world.store.stats().errors == {}


def test_retries_end() -> None:
    pages = page_refs(2)
    with World(config={"deadline_s": 1000}) as world:
        world.backend.always(Fault(error=StorageUnavailable("connection lost")), "get")
        op = world.start_fetch(pages)
        let_it_retry(world, times=3)

        assert world.finished(op).outcomes == (False, False)
        assert world.backend.num_calls["get"] == 4
        assert world.store.stats().errors == {"fetch_StorageUnavailable": 1}


def test_there_is_no_retry_beyond_the_deadline() -> None:
    with World(config={"deadline_s": 0.01}) as world:
        world.backend.always(Fault(error=StorageUnavailable("connection lost")), "get")

        assert world.fetch_pages(page_refs(1)) == [False]

        assert world.backend.num_calls["get"] == 1


def test_there_is_no_retry_of_what_was_given_up() -> None:
    gate = Gate()
    with World() as world:
        world.backend.next("get", Fault(before=gate, error=StorageUnavailable("late")))
        op = world.start_fetch(page_refs(1))
        gate.wait_until_reached()
        world.advance(5)
        assert not world.finished(op).is_returned

        gate.open()

        assert world.returned(op) == Returned(op)
        assert world.backend.num_calls["get"] == 1


# ---------------------------------------------------------------- queues


def test_stores_beyond_the_queue_are_dropped_and_counted() -> None:
    gate = Gate()
    with World(config={"queue_pages": 10, "concurrency": 1}) as world:
        world.backend.next("put", Fault(before=gate))
        running = world.start_store(page_refs(4))
        gate.wait_until_reached()
        queued = world.start_store(page_refs(8, first_token=100), first=10)
        partly = world.start_store(page_refs(8, first_token=200), first=20)
        dropped = world.start_store(page_refs(8, first_token=300), first=30)

        assert world.finished(dropped) == Finished(dropped, (False,) * 8)
        gate.open()

        assert world.finished(running).outcomes == (True,) * 4
        assert world.finished(queued).outcomes == (True,) * 8
        assert world.finished(partly).outcomes == (True, True) + (False,) * 6
        assert world.store.stats().dropped == {"store_queue_full": 14}


def test_fetches_beyond_the_queue_are_misses() -> None:
    gate = Gate()
    with World(config={"queue_pages": 10, "concurrency": 1}) as world:
        world.backend.next("get", Fault(before=gate))
        running = world.start_fetch(page_refs(1))
        gate.wait_until_reached()
        queued = world.start_fetch(page_refs(10), first=140)
        missed = world.start_fetch(page_refs(1), first=160)

        assert world.finished(missed) == Finished(missed, (False,))
        gate.open()

        world.finished(running)
        world.finished(queued)
