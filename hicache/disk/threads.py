"""Threads for calls that block: one hop a batch, and buffers that are given back for certain.

They are daemons: a call that hangs in the kernel does not keep the process from ending.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A few threads of a backend; ``close`` joins them."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.num_threads = num_threads
        self.executor: Executor = _DaemonExecutor(name, num_threads)

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


class _DaemonExecutor(Executor):
    """Threads that do not keep the process from ending, as those of the standard library would
    where a call to the disk hangs."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._threads: list[Thread] = []
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = Lock()
        self._is_closed = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  whoever waits for the future gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name} is closed")
            self._work.put(work)
            if len(self._threads) < self._num_threads:
                name = f"{self._name}_{len(self._threads)}"
                self._threads.append(Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._work.put(None)  # behind all work
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # with the buffers of its call


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
