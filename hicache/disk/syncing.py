"""When what was written is on the disk: the system's promise, asked for in the right order.

Data goes before the name that makes it visible, a name before whoever asked is told.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from hicache.errors import StorageError

logger = logging.getLogger(__name__)


def sync_folders(paths: Iterable[str]) -> None:
    """Put the names in these directories on the disk. One that is gone has none."""
    for path in paths:
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class Periodic:
    """Does something every so often, in the loop that made it, until it is closed."""

    def __init__(self, interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
        self._interval_s = interval_s
        self._work = work
        self._is_failing = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Let what is being done end, and do it no more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._work()
            except StorageError as error:
                if not self._is_failing:
                    logger.warning("not on the disk yet, tried again: %s", error)
                self._is_failing = True
            else:
                self._is_failing = False
