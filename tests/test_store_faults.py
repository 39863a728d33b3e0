"""The store over a backend that raises, lies, hangs, and has no room."""

import asyncio
import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from hicache.backends.memory import MemoryBackend
from hicache.errors import CorruptPage, StorageError, StorageFull, StorageUnavailable
from hicache.events import Finished, Returned, StorageDown, StorageUp
from hicache.keys import PageKey
from hicache.testing.faulty import Fault, Gate, Method
from tests.stores import NAMESPACE, FakeClock, World, content, namespace, page_refs

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


def reads_and_writes(world: World) -> None:
    """Assert that the store works."""
    pages = page_refs(3, first_token=50_000)
    assert world.store_pages(pages, first=40) == [True] * 3
    assert world.fetch_pages(pages, first=120) == [True] * 3
    world.store.delete([page.key for page in pages])
    world.store.check()


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
        reads_and_writes(world)
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
        reads_and_writes(world)


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


# ---------------------------------------------------------------- S5: hangs


def test_s5_a_hung_read_that_wakes_up_late_changes_no_page_of_others() -> None:
    hung, others = page_refs(4), page_refs(4, first_token=7000)
    gate = Gate()
    with World() as world:
        world.store_pages(hung)
        world.store_pages(others, first=10)
        world.backend.next("get", Fault(before=gate, ignores_cancel=True))
        op = world.start_fetch(hung, first=128)
        gate.wait_until_reached()

        world.advance(5)
        given_up = world.finished(op)
        assert given_up == Finished(op, (False,) * 4, is_returned=False)
        assert world.store.stats().num_overdue_pages == 4
        assert world.fetch_pages(others, first=200) == [True] * 4
        gate.open()
        world.returned(op)

        assert world.store.stats().num_overdue_pages == 0
        assert world.fetch_pages(others, first=128) == [True] * 4
        for number, page in enumerate(others):
            assert world.page(128 + number) == content(page.key)
        assert world.store.stats().num_fetched_pages == 8
        world.store.check()


class ThreadedBackend(MemoryBackend):
    """Reads in a thread, naively: cancelling the coroutine would not stop the thread."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slow = False
        self.has_begun = threading.Event()
        self.go_on = threading.Event()

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        if self.is_slow:
            self.is_slow = False
            await asyncio.to_thread(self._dawdle, into)
        return await super().get(keys, into)

    def _dawdle(self, into: Sequence[Sequence[memoryview]]) -> None:
        self.has_begun.set()
        assert self.go_on.wait(20)
        for buffers in into:
            for buffer in buffers:
                buffer[:] = bytes(len(buffer))


def test_s5_a_thread_that_still_writes_keeps_its_pages() -> None:
    backend, pages = ThreadedBackend(), page_refs(3)
    with World(inner=backend) as world:
        world.store_pages(pages)
        backend.is_slow = True
        op = world.start_fetch(pages)
        assert backend.has_begun.wait(20)

        world.advance(5)
        assert not world.finished(op).is_returned
        world.store.cancel(op)
        world.probe_keys([])
        assert world.store.stats().num_overdue_pages == 3
        assert world.drain() == []

        backend.go_on.set()
        world.returned(op)
        assert world.fetch_pages(pages) == [True] * 3


def test_a_read_that_ends_late_counts_for_nothing() -> None:
    pages, gate = page_refs(1), Gate()
    with World() as world:
        world.store_pages(pages)
        world.backend.next("get", Fault(after=gate))
        op = world.start_fetch(pages)
        gate.wait_until_reached()
        world.advance(5)
        world.finished(op)

        gate.open()
        world.returned(op)

        assert world.store.stats().num_fetched_pages == 0
        assert "fetch" not in world.store.stats().num_calls


def test_a_store_that_was_given_up_before_it_wrote_does_not_write() -> None:
    pages, gate = page_refs(1), Gate()
    with World() as world:
        world.backend.next("contains", Fault(before=gate))
        op = world.start_store(pages)
        gate.wait_until_reached()
        world.advance(5)
        assert world.finished(op) == Finished(op, (False,), is_returned=False)

        gate.open()
        world.returned(op)

        assert world.backend.num_calls["put"] == 0


def test_a_hung_write_does_not_hold_up_reads() -> None:
    pages, gate = page_refs(3), Gate()
    with World(config={"concurrency": 1}) as world:
        world.store_pages(pages)
        world.backend.next("put", Fault(before=gate))
        stored = world.start_store(page_refs(3, first_token=99), first=20)
        gate.wait_until_reached()
        waiting = world.start_store(page_refs(3, first_token=999), first=30)

        assert world.fetch_pages(pages) == [True] * 3
        assert world.probe_keys([pages[0].key]) == [True]

        gate.open()
        assert world.finished(stored).outcomes == (True,) * 3
        assert world.finished(waiting).outcomes == (True,) * 3


def test_a_cancelled_fetch_ends_and_leaves_the_rest_of_its_batch_alone() -> None:
    pages, gate = page_refs(20), Gate()
    with World(num_pages=256, config={"concurrency": 1}) as world:
        world.store_pages(pages)
        world.backend.next("get", Fault(before=gate))
        running = world.start_fetch(pages[:16], first=128)
        queued = world.start_fetch(pages[16:18], first=150)
        other = world.start_fetch(pages[18:], first=160)
        gate.wait_until_reached()

        world.store.cancel(queued)
        assert world.finished(queued) == Finished(queued, (False, False))
        world.store.cancel(running)
        gate.open()

        assert world.finished(other).outcomes == (True, True)
        assert world.finished(running).is_returned
        world.store.check()


def test_at_most_an_eighth_of_the_pool_is_ever_lent_to_overdue_calls() -> None:
    gate = Gate()
    with World(num_pages=160, config=PATIENT) as world:
        world.backend.always(Fault(before=gate), "get", "put")
        ops = [world.start_fetch(page_refs(4, first_token=100 * n), 4 * n) for n in range(10)]
        ops += [world.start_store(page_refs(4, first_token=100 * n), 80 + 4 * n) for n in range(10)]
        while len(world.drain()) < len(ops):
            world.advance(5)
            world.store.check()
            assert world.store.stats().num_overdue_pages <= 160 // 8
            time.sleep(0)
        over = [world.finished(op) for op in ops]

        assert sum(not finished.is_returned for finished in over) >= 5
        late = world.start_fetch(page_refs(1), first=159)
        assert world.finished(late) == Finished(late, (False,))
        assert world.store.stats().dropped["fetch_lent"] > 0
        gate.open()
        world.wait_until(lambda: world.store.stats().num_lent_pages == 0)
        world.backend.heal()
        reads_and_writes(world)


class BlockingBackend(MemoryBackend):
    """Breaks the rule: blocks the loop itself."""

    def __init__(self) -> None:
        super().__init__()
        self.is_blocked = threading.Event()
        self.go_on = threading.Event()

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        if not self.go_on.is_set():
            self.is_blocked.set()
            self.go_on.wait(20)
        return await super().contains(keys)


def test_deadlines_are_kept_where_a_backend_blocks_the_loop() -> None:
    backend = BlockingBackend()
    with World(inner=backend) as world:
        blocked = world.start_store(page_refs(2))
        assert backend.is_blocked.wait(20)
        queued = world.start_fetch(page_refs(2))

        world.clock.now += 5 + 1
        events = world.store.drain()
        late = world.start_fetch(page_refs(2), first=140)
        events += world.store.drain()

        assert Finished(blocked, (False, False), is_returned=False) in events
        assert Finished(queued, (False, False)) in events
        assert Finished(late, (False, False)) in events
        assert world.store.stats().dropped["fetch_stalled"] == 4
        backend.go_on.set()
        world.returned(blocked)
        world.wait_until(lambda: world.store_pages(page_refs(1)) == [True])
        reads_and_writes(world)


# ---------------------------------------------------------------- the breaker


def broken(world: World) -> None:
    """Fail until the breaker opens."""
    world.backend.always(Fault(error=OSError(errno.EIO, "gone")), "get", "put", "contains")
    for _ in range(5):
        assert world.store.stats().is_up
        assert world.fetch_pages(page_refs(1)) == [False]
    world.wait_for(StorageDown)


def test_the_breaker_opens_after_failures_in_a_row_and_closes_when_a_trial_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = page_refs(2)
    with caplog.at_level(logging.INFO, "hicache"), World() as world:
        world.store_pages(pages)
        broken(world)
        calls = world.backend.num_calls["get"]

        assert not world.store.stats().is_up
        assert world.fetch_pages(pages) == [False] * 2
        assert world.store_pages(pages) == [False] * 2
        assert world.probe_keys([pages[0].key]) == [False]
        assert world.backend.num_calls["get"] == calls
        world.advance(5)
        world.wait_until(lambda: world.store.stats().errors.get("trial_OSError") == 1)
        assert not world.store.stats().is_up
        world.backend.heal()
        world.advance(5)

        world.wait_for(StorageUp)
        assert world.fetch_pages(pages) == [True] * 2
        stats = world.store.stats()
        assert (stats.num_breaks, stats.is_up) == (1, True)
        assert stats.dropped["fetch_down"] == 2
        assert "storage is attached again" in caplog.messages


def test_a_success_between_failures_keeps_the_breaker_closed() -> None:
    pages = page_refs(1)
    with World(config={"breaker_failures": 2}) as world:
        world.store_pages(pages)
        for _ in range(4):
            world.backend.next("get", Fault(error=ValueError()))
            assert world.fetch_pages(pages) == [False]
            assert world.fetch_pages(pages) == [True]

        assert world.store.stats().num_breaks == 0


def test_a_success_from_before_does_not_close_the_breaker() -> None:
    gate, pages = Gate(), page_refs(1)
    with World() as world:
        world.store_pages(pages)
        world.backend.next("get", Fault(before=gate))
        op = world.start_fetch(pages, first=200)
        gate.wait_until_reached()
        broken(world)

        gate.open()

        assert world.finished(op).outcomes == (True,)
        assert not world.store.stats().is_up


def test_misses_and_bad_records_do_not_open_the_breaker() -> None:
    with World(config={"breaker_failures": 1}) as world:
        world.backend.next("put", Fault(tamper=lambda record, random: record[:100]))
        world.store_pages(page_refs(1))

        assert world.fetch_pages(page_refs(2)) == [False, False]

        assert world.store.stats().is_up


def test_deadlines_open_the_breaker_and_what_is_queued_fails_at_once() -> None:
    gate, pages = Gate(), page_refs(1)
    with World(config={"breaker_failures": 2, "concurrency": 2}) as world:
        world.backend.always(Fault(before=gate), "get")
        ops = [world.start_fetch(pages, 128 + number) for number in range(2)]
        gate.wait_until_reached()
        ops += [world.start_fetch(pages, 150 + number) for number in range(10)]
        world.wait_until(lambda: world.backend.num_calls["get"] == 2)

        world.advance(5)
        over = [world.finished(op) for op in ops]
        world.wait_for(StorageDown)

        assert all(finished.outcomes == (False,) for finished in over)
        assert not world.store.stats().is_up
        gate.open()
        world.backend.heal()
        for finished in over:
            if not finished.is_returned:
                world.returned(finished.op)
        world.advance(5)
        world.wait_for(StorageUp)


def test_trials_that_hang_do_not_pile_up() -> None:
    gate = Gate()
    with World() as world:
        broken(world)
        world.backend.always(Fault(before=gate), "contains")
        calls = world.backend.num_calls["contains"]
        for number in range(12):
            world.advance(5)
            expected = calls + min(number + 1, 8)
            world.wait_until(lambda: world.backend.num_calls["contains"] >= expected)  # noqa: B023
            world.probe_keys([])

        assert world.backend.num_calls["contains"] == calls + 8
        gate.open()
        world.wait_for(StorageUp)
        world.backend.heal()
        reads_and_writes(world)
        assert world.store.stats().num_breaks == 1
        assert [e for e in world.drain() if isinstance(e, StorageUp)] == []


def test_a_trial_that_raises_what_no_trial_should_leaves_the_store_detached() -> None:
    with World() as world:
        broken(world)
        world.backend.always(Fault(answer=lambda answer: "yes"), "contains")
        world.advance(5)
        world.wait_until(lambda: "trial_WrongAnswer" in world.store.stats().errors)

        assert not world.store.stats().is_up


def test_deletes_and_descriptions_wait_for_the_storage_to_come_back() -> None:
    pages = page_refs(2)
    with World() as world:
        world.store_pages(pages)
        broken(world)
        world.store.delete([pages[0].key])
        assert world.store.flush(0)
        assert world.store.stats().num_queued["delete"] == 1

        world.backend.heal()
        world.advance(5)
        world.wait_for(StorageUp)
        assert world.store.flush(20)

        assert world.fetch_pages(pages) == [False, True]


# ---------------------------------------------------------------- S4: full


@pytest.mark.parametrize(
    "error",
    [StorageFull("no room"), OSError(errno.ENOSPC, "no space"), OSError(errno.EDQUOT, "quota")],
    ids=["StorageFull", "ENOSPC", "EDQUOT"],
)
def test_s4_a_full_store_costs_stores_and_nothing_else(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    pages, more = page_refs(2), page_refs(2, first_token=99)
    with World(config={"breaker_failures": 1}) as world, caplog.at_level(logging.INFO, "hicache"):
        world.store_pages(pages)
        world.backend.always(Fault(error=error), "put")

        for _ in range(3):
            assert world.store_pages(more, first=10) == [False, False]
            assert world.store.stats().is_full
            assert world.store_pages(more, first=10) == [False, False]
            assert world.fetch_pages(pages) == [True, True]
            world.advance(5)
            world.wait_until(lambda: not world.store.stats().is_full)

        assert world.backend.num_calls["put"] == 1 + 3
        assert world.store.stats().dropped == {"store_failed": 6, "store_full": 6}
        world.backend.heal()
        assert world.store_pages(more, first=10) == [True, True]
        assert world.store.stats().num_breaks == 0
        said = [message for message in caplog.messages if "room" in message]
        assert len(said) == 2
        assert said[1] == "storage has room again"


def test_two_calls_that_find_the_store_full_suspend_it_once() -> None:
    gate = Gate()
    with World() as world:
        full = Fault(before=gate, error=StorageFull("no room"))
        world.backend.next("put", full, full)
        one = world.start_store(page_refs(1))
        gate.wait_until_reached()
        two = world.start_store(page_refs(1, first_token=9), first=9)
        world.wait_until(lambda: world.backend.num_calls["put"] == 2)
        gate.open()
        world.finished(one)
        world.finished(two)

        world.advance(5)
        world.wait_until(lambda: not world.store.stats().is_full)

        reads_and_writes(world)


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


# ---------------------------------------------------------------- closing


def test_close_finishes_the_stores_that_were_asked_for() -> None:
    pages = page_refs(40)
    world = World()
    with world:
        op = world.start_store(pages)

    assert world.finished(op).outcomes == (True,) * 40


def test_close_with_a_hung_backend_says_what_it_abandons(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    world = World()
    world.store.start()
    world.backend.next("put", Fault(before=gate, ignores_cancel=True))
    hung = world.start_store(page_refs(3))
    gate.wait_until_reached()
    queued = world.start_fetch(page_refs(2))
    world.finished(queued)

    assert not world.store.close(0.01)

    assert world.finished(hung) == Finished(hung, (False,) * 3, is_returned=False)
    assert caplog.messages[-1] == (
        "closing: FaultyBackend hangs; abandoned 1 of its calls with 3 pages of host memory, "
        "and the thread hicache-storage"
    )
    gate.open()
    assert world.store.close(20)
    assert world.returned(hung) == Returned(hung)
    assert world.backend.num_calls["close"] == 1


def test_close_with_a_backend_that_hangs_in_close(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    world = World()
    world.store.start()
    world.backend.next("close", Fault(before=gate))

    assert not world.store.close(0.01)

    assert "abandoned 0 of its calls" in caplog.messages[-1]
    gate.open()
    assert world.store.close(20)


def test_close_with_a_backend_that_raises_in_close(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.store.start()
    world.backend.next("close", Fault(error=RuntimeError("it will not")))

    assert world.store.close(20)

    assert caplog.messages == ["closing the storage backend failed"]


def test_close_does_not_wait_for_a_detached_backend() -> None:
    world = World()
    with world:
        broken(world)
        world.store.delete([PageKey(bytes(32))])


class BreakableClock(FakeClock):
    """Stands for a bug of ours in the loop itself."""

    is_broken = False

    def __call__(self) -> float:
        if self.is_broken and threading.current_thread().name == "hicache-storage":
            self.is_broken = False
            raise ZeroDivisionError
        return self.now


def test_when_the_loop_dies_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    clock = BreakableClock()
    world = World(clock=clock)
    world.store.start()
    gate = Gate()
    world.backend.next("get", Fault(before=gate))
    hanging = world.start_fetch(page_refs(1))
    gate.wait_until_reached()

    clock.is_broken = True
    world.store.pump()

    assert world.finished(hanging).outcomes == (False,)
    assert world.fetch_pages(page_refs(1), first=140) == [False]
    assert world.store.close(20)
    assert world.store.stats().num_overdue_pages == 1
    assert "the storage loop died: L3 is off until the next start" in caplog.messages
