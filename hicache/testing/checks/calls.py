"""Many calls at once, calls that are cancelled, and the loop that they share."""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from random import Random
from typing import Any

from hicache.testing.checks.registry import check
from hicache.testing.expecting import expect, expect_that
from hicache.testing.records import Subject, is_zero, key

MIB = 1024 * 1024
MOST_BLOCKED_S = 0.1
_BLOCKED_TRIES = 5
_LATE_S = 0.05


@check
async def concurrent_calls_see_records_whole_or_absent(store: Subject) -> None:
    """While others put and delete the same keys, get finds each record whole or not at all."""
    nbytes, names = 40_000, range(6)
    wrong: list[object] = []

    async def write(random: Random) -> None:
        for _ in range(30):
            chosen = random.sample(names, 3)
            if random.random() < 0.5:
                await store.put(*chosen, nbytes=nbytes)
            else:
                await store.delete(*chosen)

    async def look(random: Random) -> None:
        for _ in range(60):
            chosen = random.sample(names, 3)
            for name, found in zip(chosen, await store.get(*chosen, nbytes=nbytes), strict=True):
                if found not in (None, store.record(name, nbytes)):
                    wrong.append(name)

    async with asyncio.TaskGroup() as tasks:
        for seed in range(3):
            tasks.create_task(write(Random(seed)))
            tasks.create_task(look(Random(seed)))

    expect("reads of half a record", len(wrong), 0)


@check
async def a_cancelled_get_has_let_go_of_its_buffers(store: Subject) -> None:
    """Once get has raised CancelledError nothing writes to its buffers any more, however late:
    they may be another page by then. A thread that still reads must be waited for."""
    nbytes, names = 256 * 1024, range(16)
    await store.put(*names, nbytes=nbytes)
    given_back: list[memoryview] = []
    for num_turns in range(6):
        buffers = [store.buffer(nbytes) for _ in names]
        call = store.backend.get([key(name) for name in names], [[one] for one in buffers])
        await _cancelled_after(call, num_turns)
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))
        given_back += buffers

        await store.read(0, nbytes)  # time for whoever still writes

        _expect_untouched(given_back)
    await asyncio.sleep(_LATE_S)
    await store.backend.close()
    _expect_untouched(given_back)


@check
async def a_cancelled_put_leaves_records_whole_or_absent(store: Subject) -> None:
    """Once put has raised CancelledError its buffers may change, and no record is of both."""
    nbytes, names = 256 * 1024, range(16)
    for num_turns in range(6):
        sources = [store.source(name, nbytes) for name in names]
        call = store.backend.put(
            [(key(name), [one]) for name, one in zip(names, sources, strict=True)]
        )
        await _cancelled_after(call, num_turns)
        for source in sources:
            source[:] = bytes(len(source))

        for name in names:
            found = await store.read(name, nbytes)
            if found is not None:
                expect("a record whose put was cancelled", found, store.record(name, nbytes))
        await store.delete(*names)


@check
async def a_call_that_was_cancelled_spoils_no_other(store: Subject) -> None:
    """The backend goes on after cancelled calls of every kind."""
    names = range(8)
    await store.put(*names)
    for num_turns in range(3):
        keys = [key(name) for name in names]
        await _cancelled_after(store.backend.contains(keys), num_turns)
        await _cancelled_after(store.backend.touch(keys), num_turns)
        await _cancelled_after(store.backend.stats(), num_turns)
        await _cancelled_after(store.scan(8), num_turns)

    expect("the records", await store.get(*names), [store.record(name) for name in names])


@check
async def the_loop_turns_while_a_call_runs(store: Subject) -> None:
    """All calls share one event loop with the deadlines: whatever blocks belongs in a thread."""
    names, nbytes = range(8), MIB // 2
    await store.put(*names, nbytes=nbytes)

    async def get() -> None:
        await store.get(*names, nbytes=nbytes)

    async def put() -> None:
        await store.delete(*names)
        await store.put(*names, nbytes=nbytes)

    async def contains() -> None:
        await store.contains(*names)

    for what, make_call in (("get", get), ("put", put), ("contains", contains)):
        blocked_s = await _blocked_s(make_call())
        for _ in range(_BLOCKED_TRIES - 1):
            if blocked_s <= MOST_BLOCKED_S:
                break
            blocked_s = min(blocked_s, await _blocked_s(make_call()))
        expect_that(
            blocked_s <= MOST_BLOCKED_S,
            f"the longest that {what} kept the loop from turning, at best of {_BLOCKED_TRIES}",
            f"{MOST_BLOCKED_S} s at most",
            f"{blocked_s:.2f} s",
        )


@check
async def closing_twice_is_harmless(store: Subject) -> None:
    """close may be called again, and after an open that failed half-way."""
    await store.backend.close()
    await store.backend.close()


async def _cancelled_after(call: Awaitable[Any], num_turns: int) -> None:
    """Cancel a call after some turns of the loop; return when it has ended."""
    task = asyncio.ensure_future(call)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _expect_untouched(buffers: list[memoryview]) -> None:
    num_written = sum(not is_zero(buffer[::512]) for buffer in buffers)
    expect("buffers of cancelled reads that were written to afterwards", num_written, 0)


async def _blocked_s(call: Awaitable[None]) -> float:
    """Return the longest time between two turns of the loop while a call runs."""
    task = asyncio.ensure_future(call)
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    await task
    return longest
