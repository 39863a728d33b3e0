"""The store over a backend that fails for a while, and over one that is full."""

import errno
import logging

import pytest

from hicache.errors import StorageFull
from hicache.events import StorageDown, StorageUp
from hicache.keys import PageKey
from hicache.testing.faulty import Fault, Gate
from tests.stores import World, page_refs

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
        world.reads_and_writes()
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


def test_close_does_not_wait_for_a_detached_backend() -> None:
    world = World()
    with world:
        broken(world)
        world.store.delete([PageKey(bytes(32))])


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

        world.reads_and_writes()
