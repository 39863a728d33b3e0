"""Threads for calls that block: one hop a batch, and buffers that are given back for certain."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A few threads of a backend; ``close`` joins them."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns, from a thread.

        Cancelled, it raises only when the function has returned, or will never start: whatever
        was lent to it is free again then.
        """
        future = self._executor.submit(function, *args, **kwargs)
        done = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            future.cancel()
            while not done.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            if not done.cancelled():
                done.exception()  # taken, so that asyncio does not report it as forgotten
            raise

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start the function in a thread, for callers that are in one themselves."""
        return self._executor.submit(function, *args, **kwargs)

    def close(self) -> None:
        """Wait for what was started; nothing can be started afterwards."""
        self._executor.shutdown(wait=True)
