"""Pages that are made smaller or sealed, by way of scratch: a batch at a time, in pieces.

Scratch is bounded: a set for each call that runs, and half as many again for calls that hang and
have not returned. Beyond that calls fail. While one half of a set is decoded, the other is read.
"""

import logging
import time
from collections.abc import Sequence
from itertools import cycle

from hicache.codec import PageCodec
from hicache.errors import CorruptPage
from hicache.store.batch import Batch
from hicache.store.puts import Puts
from hicache.store.records import Records
from hicache.store.scratch import Scratch
from hicache.store.workers import Workers, together

log = logging.getLogger(__name__)

SET_NBYTES = 16 << 20
"""Of scratch; more where two pages need more."""
INLINE_NBYTES = 1 << 17
"""Up to here coding takes less time on the loop than the way to a worker and back."""

Placed = Sequence[tuple[int, memoryview]]
"""Which page of a batch has which scratch."""


class CodedPages:
    """Reads and writes batches of pages in their coded form. Belongs to the storage loop."""

    def __init__(
        self,
        codec: PageCodec,
        records: Records,
        puts: Puts,
        workers: Workers,
        *,
        max_batch: int,
        max_calls: int,
    ) -> None:
        """``max_calls``: that run at once and nobody has given up."""
        self._codec = codec
        self._records = records
        self._puts = puts
        self._workers = workers
        num_slots = min(max_batch, max(2, SET_NBYTES // codec.slot_nbytes))
        self._scratch = Scratch(max(2, num_slots), codec.slot_nbytes, max_calls + max_calls // 2)

    async def read(self, batch: Batch, at: Sequence[int]) -> None:
        """Read and prove the pages of a batch at these places; note lengths, and which are good.

        A page is written only where it is good. Stops early where the call is given up.
        """
        slots = self._scratch.take()
        try:
            length = len(slots) // 2
            halves = cycle((slots[:length], slots[length:]))
            read: Placed = []
            for start in range(0, len(at), length):
                if batch.call.is_given_up:
                    return
                placed = list(zip(at[start : start + length], next(halves), strict=False))
                await together(self._read(batch, placed), self._decode(batch, read))
                read = placed
            if not batch.call.is_given_up:
                await self._decode(batch, read)
        finally:
            self._scratch.give(slots)

    async def write(self, batch: Batch, at: Sequence[int]) -> int:
        """Store the pages of a batch at these places; note which were accepted.

        Returns the bytes of their records. Stops early where the call is given up.
        """
        nbytes = 0
        slots = self._scratch.take()
        try:
            for start in range(0, len(at), len(slots)):
                if batch.call.is_given_up:
                    break
                placed = list(zip(at[start:], slots, strict=False))
                nbytes += await self._write(batch, placed)
        finally:
            self._scratch.give(slots)
        return nbytes

    # ------------------------------------------------------------ helpers

    async def _read(self, batch: Batch, placed: Placed) -> None:
        keys = [batch.keys[at] for at, _ in placed]
        into = [[batch.headers[at], slot] for at, slot in placed]
        lengths = await self._records.get(keys, into)
        for (at, _), length in zip(placed, lengths, strict=True):
            batch.lengths[at] = length

    async def _decode(self, batch: Batch, placed: Placed) -> None:
        def decode(some: Placed) -> None:
            for at, slot in some:
                length = batch.lengths[at]
                if length is None:
                    continue
                page = batch.pages[at]
                try:
                    self._codec.decode(
                        batch.headers[at], slot, batch.views[at], page, batch.namespaces[at], length
                    )
                except CorruptPage as error:
                    log.debug("page %s: %s", page.key.hex(), error)
                else:
                    batch.good[at] = True

        if len(placed) * self._codec.page_nbytes <= INLINE_NBYTES:
            decode(placed)
        else:
            await self._workers.share(decode, placed)

    async def _write(self, batch: Batch, placed: Placed) -> int:
        payloads = await self._encode(batch, placed)
        items = [(batch.keys[at], [batch.headers[at], payloads[at]]) for at, _ in placed]
        nbytes = 0
        accepted = await self._puts.put(batch, [at for at, _ in placed], items)
        for (at, _), is_accepted in zip(placed, accepted, strict=True):
            batch.good[at] = is_accepted
            if is_accepted:
                nbytes += self._codec.header_nbytes + len(payloads[at])
        return nbytes

    async def _encode(self, batch: Batch, placed: Placed) -> dict[int, memoryview]:
        """Return what is to be stored of each page, by its place."""
        payloads: dict[int, memoryview] = {}
        created_us = time.time_ns() // 1000

        def encode(some: Placed) -> None:
            for at, slot in some:
                payloads[at] = self._codec.code(
                    batch.headers[at], slot, batch.views[at],
                    batch.pages[at], batch.namespaces[at], created_us,
                )  # fmt: skip

        if len(placed) * self._codec.page_nbytes <= INLINE_NBYTES:
            encode(placed)
        else:
            await self._workers.share(encode, placed)
        return payloads
