"""The one event loop of the library, in a thread of its own."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVarTuple

log = logging.getLogger(__name__)

_Args = TypeVarTuple("_Args")


class LoopThread:
    """Runs one coroutine, and what it starts, in a daemon thread.

    A daemon, because a backend that hangs must not keep the process from ending.
    """

    def __init__(self, name: str, clock: Callable[[], float], on_death: Callable[[], None]) -> None:
        """``on_death`` is called in the thread if the loop dies of a bug of ours.

        Afterwards what it was running is cancelled.
        """
        self._name = name
        self._clock = clock
        self._on_death = on_death
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, main: Callable[[], Coroutine[object, object, None]]) -> None:
        """Run ``main`` in the thread. The loop ends with it, and cancels what it has left."""
        assert self._thread is None
        self._loop = _ClockedLoop(self._clock)
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, main), name=self._name, daemon=True
        )
        self._thread.start()

    def post(self, function: Callable[[*_Args], object], *args: *_Args) -> None:
        """Call ``function`` in the loop soon. Nothing happens before its start or after its end."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # that it has ended
                self._loop.call_soon_threadsafe(function, *args)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; whether it has."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(
        self, loop: asyncio.AbstractEventLoop, main: Callable[[], Coroutine[object, object, None]]
    ) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(main())
            except BaseException:
                log.exception("the storage loop died: L3 is off until the next start")
                self._on_death()


class _ClockedLoop(asyncio.SelectorEventLoop):
    """Takes the time for its timers from a clock that a test may hold."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return self._clock()
