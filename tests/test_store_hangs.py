"""The store over a backend that hangs: in a call, in its loop, at the end."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from hicache.backends.memory import MemoryBackend
from hicache.events import Event, Finished, Probed, Returned, StorageDown, StorageUp
from hicache.keys import PageKey
from hicache.testing.faulty import Chances, Fault, Gate
from tests.stores import NAMESPACE, FakeClock, World, content, page_refs

PATIENT = {"breaker_failures": 1000}
"""A breaker that stays closed."""


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


def test_s5_a_hung_backend_costs_a_deadline_then_nothing_and_is_used_again_by_itself() -> None:
    pages = page_refs(2)
    with World(config={"breaker_failures": 2, "concurrency": 2}) as world:
        world.store_pages(pages)
        world.backend.chances = Chances(hung=1.0)
        hung = [world.start_fetch(pages, first=128)]
        world.wait_until(lambda: world.backend.num_calls["get"] == 1)
        hung.append(world.start_fetch(pages, first=140))
        world.wait_until(lambda: world.backend.num_calls["get"] == 2)
        assert not [event for event in world.drain() if isinstance(event, Finished)]

        world.advance(5)  # the deadline

        assert [world.finished(op).outcomes for op in hung] == [(False, False)] * 2
        world.wait_for(StorageDown)
        num_calls = world.backend.num_calls["get"]
        for _ in range(20):  # without a moment passing
            assert world.fetch_pages(pages, first=200) == [False, False]
        assert world.backend.num_calls["get"] == num_calls

        world.backend.heal()
        world.backend.hung.open()
        for op in hung:
            world.returned(op)
        world.advance(5)  # the next trial
        world.wait_for(StorageUp)
        assert world.fetch_pages(pages) == [True, True]
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
        assert world.store.stats().call_seconds["fetch"].num == 0


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
        gate.wait_until_reached()
        queued = world.start_fetch(pages[16:18], first=150)
        other = world.start_fetch(pages[18:], first=160)

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
        world.reads_and_writes()


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
        world.reads_and_writes()


def test_they_are_kept_by_whoever_drains_all_the_time_too() -> None:
    backend = BlockingBackend()
    with World(inner=backend) as world:
        blocked = world.start_store(page_refs(2))
        assert backend.is_blocked.wait(20)
        queued = world.start_fetch(page_refs(2))

        events: list[Event] = []
        for _ in range(70):
            world.clock.now += 0.1
            events += world.store.drain()

        assert Finished(blocked, (False, False), is_returned=False) in events
        assert Finished(queued, (False, False)) in events
        backend.go_on.set()
        world.returned(blocked)
        world.wait_until(lambda: world.store_pages(page_refs(1)) == [True])
        world.reads_and_writes()


class BlockingScan(BlockingBackend):
    """Blocks the loop where no call of the store's waits for it."""

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return await MemoryBackend.contains(self, keys)

    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        self.is_blocked.set()
        self.go_on.wait(20)
        async for found in super().scan(header_nbytes):
            yield found


def test_a_scan_that_blocks_the_loop_leaves_no_probe_unanswered() -> None:
    backend = BlockingScan()
    with World(inner=backend) as world:
        world.store_pages(page_refs(2))
        world.store.scan(NAMESPACE)
        assert backend.is_blocked.wait(20)
        probe = world.start_probe([page.key for page in page_refs(2)])

        events: list[Event] = []
        for _ in range(70):
            world.clock.now += 0.1
            events += world.store.drain()
        late = world.start_probe([page.key for page in page_refs(2)])
        events += world.store.drain()

        assert Probed(probe, (False, False)) in events
        assert Probed(late, (False, False)) in events
        backend.go_on.set()
        world.wait_until(lambda: world.store_pages(page_refs(1)) == [True])
        world.reads_and_writes()


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
