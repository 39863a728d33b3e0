"""Threads that compute, and let go of the GIL while they do: checksums, codecs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

_Args = TypeVarTuple("_Args")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers:
    """A few threads beside the storage loop. They wait for nothing but memory."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, "hicache-checksum")

    async def run(self, function: Callable[[*_Args], _Result], *args: *_Args) -> _Result:
        """Return what the function returns, from a thread: one hop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, *args)

    async def share(
        self, function: Callable[[Sequence[_Item]], object], items: Sequence[_Item]
    ) -> None:
        """Let all threads work on items: one hop each. Raises only when all are done."""
        num_shares = min(self._num_threads, len(items))
        shares = [items[first::num_shares] for first in range(num_shares)]
        await together(*[self.run(function, share) for share in shares])

    def close(self) -> None:
        """Join the threads."""
        self._executor.shutdown()


async def together(*work: Awaitable[object]) -> None:
    """Wait for all of it, however it ends; then raise what failed first in order.

    So nothing touches a buffer any more when this is over.
    """
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
