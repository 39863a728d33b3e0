"""The reader's end of a request: outputs as they come, and the way to give up.

The step thread puts, one reader takes, from a thread or from an event loop. Nothing is lost and
nothing is waited for by the step thread. What has not been taken yet is bounded by the
request's own ``max_tokens``.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from hicache.engine.outputs import HitTokens, Output, Timing

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Generation:
    """What ``Engine.submit`` returns."""

    def __init__(
        self, name: str, prompt_tokens: int, arrived: float, on_abort: Callable[[], None]
    ) -> None:
        self.id = name
        self.prompt_tokens = prompt_tokens
        self.hit = HitTokens()
        """Prompt tokens that were not computed. Valid from the first output on."""
        self.timing = Timing(arrived)
        self._on_abort = on_abort
        self._outputs: deque[Output] = deque()
        self._is_ended = False
        self._changed = threading.Condition()
        self._waiter: _Waiter | None = None

    # ------------------------------------------------------------ the reader

    def __iter__(self) -> Iterator[Output]:
        """Yield outputs, blocking in between; the last has a ``finish_reason``."""
        while True:
            with self._changed:
                while not self._outputs and not self._is_ended:
                    self._changed.wait()
                if not self._outputs:
                    return
                output = self._outputs.popleft()
            yield output

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs without blocking the event loop; the last has a ``finish_reason``."""
        loop = asyncio.get_running_loop()
        while True:
            waiter: asyncio.Future[None] | None = None
            output: Output | None = None
            with self._changed:
                if self._outputs:
                    output = self._outputs.popleft()
                elif self._is_ended:
                    return
                else:
                    waiter = loop.create_future()
                    self._waiter = (loop, waiter)
            if output is not None:
                yield output
            elif waiter is not None:
                await waiter

    def abort(self) -> None:
        """Ask for the end; what was held is given back within a step. Harmless when over."""
        self._on_abort()

    @property
    def is_ended(self) -> bool:
        """Whether the last output was put, though perhaps not taken yet."""
        return self._is_ended

    # ------------------------------------------------------------ the step thread

    def put(self, output: Output, now: float) -> None:
        """Hand over an output; the one with a ``finish_reason`` ends the generation."""
        assert not self._is_ended
        timing = self.timing
        if timing.first_token is None and output.token_ids:
            timing = replace(timing, first_token=now)
        if output.finish_reason is not None:
            timing = replace(timing, finished=now)
        with self._changed:
            self.timing = timing
            self._outputs.append(output)
            self._is_ended = output.finish_reason is not None
            self._changed.notify()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            with suppress(RuntimeError):  # the reader's loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
