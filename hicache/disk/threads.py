"""Threads for calls that block: one hop a batch, and buffers that are given back for certain."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A few threads of a backend; ``close`` joins them."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.num_threads = num_threads
        self.executor = ThreadPoolExecutor(num_threads, name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns, from a thread.

        Cancelled, it raises only when the function has returned, or will never start: whatever
        was lent to it is free again then.
        """
        future = self.executor.submit(function, *args, **kwargs)
        return await to_its_end(asyncio.wrap_future(future), future.cancel)

    def share(self, function: Callable[[T], None], items: Iterable[T]) -> None:
        """Call the function for each item, here and in threads that are idle.

        Blocks; for callers that are in one of these threads already. Returns, also with an
        exception, only when no call is running any more; after an exception no more are begun.
        """
        left = deque(items)
        helpers: list[Future[None]] = [
            self.executor.submit(_work, function, left)
            for _ in range(min(len(left), self.num_threads) - 1)
        ]
        try:
            _work(function, left)
        finally:
            left.clear()
            wait([helper for helper in helpers if not helper.cancel()])
        for helper in helpers:
            if not helper.cancelled():
                helper.result()

    def close(self) -> None:
        """Wait for what was started; nothing can be started afterwards."""
        self.executor.shutdown(wait=True)


async def to_its_end(future: "asyncio.Future[T]", give_up: Callable[[], object]) -> T:
    """Return what the future gives.

    Cancelled, call ``give_up``, wait until the future is over nevertheless, and raise then. The
    future itself is not cancelled: asyncio would call it over while its thread goes on.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        give_up()
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # taken, so that asyncio does not report it as forgotten
        raise


def _work(function: Callable[[T], None], left: deque[T]) -> None:
    while True:
        try:
            item = left.popleft()
        except IndexError:
            return
        function(item)
