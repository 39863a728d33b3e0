"""Large records, each read on its own by aiofiles: none waits for the rest of its batch."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import aiofiles
from aiofiles.threadpool.binary import AsyncFileIO

from hicache.backends.file.files import Damaged, RecordFiles
from hicache.disk.frame import FRAME_NBYTES, is_frame_of
from hicache.disk.threads import to_its_end
from hicache.disk.vector import limit, nbytes_of
from hicache.keys import PageKey


@dataclass(slots=True)
class LargeRead:
    """The reads of one batch, and whether they are still wanted."""

    files: RecordFiles
    executor: Executor
    _is_wanted: bool = field(default=True, init=False)

    async def read(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | Damaged | None]:
        """Return each record's length, ``None`` where absent, or what is wrong with it.

        Returns or raises only when no buffer is written to any more, also if cancelled.
        """
        reads = (self._read_one(key, buffers) for key, buffers in zip(keys, into, strict=True))
        results = await to_its_end(asyncio.gather(*reads, return_exceptions=True), self._stop)
        lengths: list[int | Damaged | None] = []
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Damaged):
                raise result
            lengths.append(result)
        return lengths

    def _stop(self) -> None:
        self._is_wanted = False

    async def _read_one(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        if not self._is_wanted:
            return None
        opened = aiofiles.open(self.files.path(key), "rb", buffering=0, executor=self.executor)
        try:
            async with opened as file:
                status = os.fstat(file.fileno())
                nbytes = status.st_size - FRAME_NBYTES
                packed = memoryview(bytearray(FRAME_NBYTES))
                body = limit(buffers, nbytes)
                count = await _fill(file, [packed, *body])
        except (FileNotFoundError, NotADirectoryError):
            return None
        if count < FRAME_NBYTES + nbytes_of(body) or not is_frame_of(packed, key, nbytes):
            raise Damaged(status)
        return nbytes


async def _fill(file: AsyncFileIO, buffers: Sequence[memoryview]) -> int:
    """Read into the buffers, in order; return how much there was."""
    total = 0
    for buffer in buffers:
        done = 0
        while done < buffer.nbytes:
            count = await file.readinto(buffer.cast("B")[done:])
            if not count:
                return total + done
            done += count
        total += done
    return total
