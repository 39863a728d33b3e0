"""What a call does: the conversation with a backend, none of whose answers is believed.

Runs on the storage loop, except for what reads many pages (checksums, codecs): that goes to worker
threads, one hop a batch.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import compress
from operator import or_
from typing import TypeVarTuple

from hicache.codec import PageCodec
from hicache.errors import CorruptPage, StorageUnavailable
from hicache.keys import PageKey
from hicache.machine import num_cpus
from hicache.storage import StorageBackend
from hicache.store.batch import Batch
from hicache.store.coded import CodedPages
from hicache.store.operations import Call, Kind
from hicache.store.puts import Puts
from hicache.store.quotas import Quotas
from hicache.store.records import Records, flags_in
from hicache.store.scratch import Scratch
from hicache.store.workers import Workers

log = logging.getLogger(__name__)

_Args = TypeVarTuple("_Args")

MAX_RETRIES = 3
FIRST_BACKOFF_S = 0.05
_NUM_WORKERS = 2
"""Threads that compute checksums, at 10 to 25 GB/s each: more would outrun any disk. Codecs are
slower, and get one for each processor."""
INLINE_NBYTES = 64 << 20
"""Up to here checksums are computed on the loop: 3 ms at 25 GB/s. The way to a worker and back
takes two wake-ups, of 0.1 ms each, and of 5 ms beside a thread that is busy in Python."""


class Caller:
    """Makes calls to one backend. All methods but the constructor belong to the loop thread."""

    def __init__(
        self,
        backend: StorageBackend,
        codec: PageCodec,
        memory: memoryview,
        quotas: Quotas,
        max_calls: int,
    ) -> None:
        """``max_calls``: that run at once, reads and writes each."""
        assert len(memory) % codec.page_nbytes == 0
        self.counts: Counter[str] = Counter()
        """Pages and bytes that came to something, and pages that were not what they should be."""
        self._backend = backend
        self._quotas = quotas
        self._records = Records(backend, codec.keyring)
        self._puts = Puts(self._records, quotas, backend.max_batch)
        self._codec = codec
        self._memory = memory
        self._headers = Scratch(backend.max_batch, codec.header_nbytes)
        self._workers = Workers(_NUM_WORKERS if codec.is_direct else max(_NUM_WORKERS, num_cpus()))
        self._coded = CodedPages(
            codec, self._records, self._puts, self._workers,
            max_batch=backend.max_batch, max_calls=2 * max_calls,
        )  # fmt: skip
        self._bodies: dict[Kind, Callable[[Call], Awaitable[list[bool]]]] = {
            "probe": self._probe,
            "fetch": self._fetch,
            "store": self._store,
            "delete": self._delete,
            "touch": self._touch,
            "describe": self._describe,
        }

    def close(self) -> None:
        """Join the worker threads. They wait for nothing but memory, so this is short."""
        self._workers.close()

    async def perform(self, call: Call) -> list[bool]:
        """Return one outcome a key. Raises whatever the backend raises.

        What is worth retrying is tried again within the call's deadline. However it ends, the
        backend has returned: nothing touches the call's pages afterwards.
        """
        clock, backoff_s = asyncio.get_running_loop().time, FIRST_BACKOFF_S
        for _ in range(MAX_RETRIES):
            try:
                return await self._bodies[call.kind](call)
            except StorageUnavailable:
                if call.is_given_up or clock() + backoff_s >= call.deadline:
                    raise
            self.counts["retries"] += 1
            await asyncio.sleep(backoff_s)
            backoff_s *= 2
        return await self._bodies[call.kind](call)

    async def trial(self) -> None:
        """Return if the backend answers."""
        flags_in(await self._backend.contains([PageKey(bytes(32))]), 1)

    # ------------------------------------------------------------ reads

    async def _probe(self, call: Call) -> list[bool]:
        return await self._records.contains(call.keys)

    async def _fetch(self, call: Call) -> list[bool]:
        headers = self._headers.take()
        try:
            batch = Batch(call, self._views(call), headers)
            coded: Sequence[int] = range(call.num_keys)
            if self._codec.is_direct:
                coded = await self._read(batch)
            if coded and not call.is_given_up:
                await self._coded.read(batch, coded)
        finally:
            self._headers.give(headers)
        if call.is_given_up:
            return [False] * call.num_keys
        for length, is_good in zip(batch.lengths, batch.good, strict=True):
            if is_good and length is not None:
                self.counts["fetched_pages"] += 1
                self.counts["read_nbytes"] += length
        self.counts["absent_pages"] += batch.lengths.count(None)
        corrupt = [
            key
            for key, is_good, length in zip(batch.keys, batch.good, batch.lengths, strict=True)
            if not is_good and length is not None
        ]
        if corrupt:
            await self._quarantine(corrupt)
        self._quotas.used(compress(batch.keys, batch.good))
        return batch.good

    async def _read(self, batch: Batch) -> list[int]:
        """Read records straight into pages; return where they have to be decoded instead."""
        into = [[header, view] for header, view in zip(batch.headers, batch.views, strict=False)]
        batch.lengths = await self._records.get(batch.keys, into)
        if batch.call.is_given_up:
            return []
        await self._off_loop(self._verify, batch)
        return [
            at
            for at, (length, is_good) in enumerate(zip(batch.lengths, batch.good, strict=True))
            if length is not None and not is_good and self._codec.is_coded(batch.headers[at])
        ]

    def _verify(self, batch: Batch) -> None:
        for at, length in enumerate(batch.lengths):
            if length is None:
                continue
            page, namespace = batch.pages[at], batch.namespaces[at]
            try:
                self._codec.verify(batch.headers[at], batch.views[at], page, namespace, length)
            except CorruptPage as error:
                log.debug("page %s: %s", page.key.hex(), error)
            else:
                batch.good[at] = True

    async def _quarantine(self, keys: list[PageKey]) -> None:
        """Delete records that are not what they should be, before anyone is told of the miss.

        So a store that follows finds them gone, and writes them anew.
        """
        self.counts["corrupt_pages"] += len(keys)
        try:
            await self._records.delete(keys)
        except BaseException as error:  # noqa: BLE001  the other pages of the batch are good
            self.counts["undeleted_pages"] += len(keys)
            log.debug("corrupt pages stay: %r", error)

    # ------------------------------------------------------------ writes

    async def _store(self, call: Call) -> list[bool]:
        present = await self._records.contains(call.keys)
        missing = [at for at, is_present in enumerate(present) if not is_present]
        self.counts["present_pages"] += len(present) - len(missing)
        if not missing or call.is_given_up:
            return present
        headers = self._headers.take()
        try:
            batch = Batch(call, self._views(call), headers)
            if self._codec.is_direct:
                nbytes = await self._write(batch, missing)
            else:
                nbytes = await self._coded.write(batch, missing)
        finally:
            self._headers.give(headers)
        self.counts["stored_pages"] += sum(batch.good)
        self.counts["written_nbytes"] += nbytes
        return list(map(or_, present, batch.good))

    async def _write(self, batch: Batch, missing: Sequence[int]) -> int:
        """Write records straight from pages; return their bytes."""
        await self._off_loop(self._encode, batch, missing)
        items = [(batch.keys[at], [batch.headers[at], batch.views[at]]) for at in missing]
        accepted = await self._puts.put(batch, missing, items)
        for at, is_accepted in zip(missing, accepted, strict=True):
            batch.good[at] = is_accepted
        return sum(accepted) * self._codec.record_nbytes

    def _encode(self, batch: Batch, missing: Sequence[int]) -> None:
        created_us = time.time_ns() // 1000
        for at in missing:
            self._codec.encode(
                batch.headers[at], batch.views[at], batch.pages[at], batch.namespaces[at],
                created_us,
            )  # fmt: skip

    async def _describe(self, call: Call) -> list[bool]:
        [part] = call.parts
        [key] = part.operation.keys
        if flags_in(await self._backend.contains([key]), 1) == [True]:
            return [True]
        return flags_in(await self._backend.put([(key, part.operation.record)]), 1)

    async def _delete(self, call: Call) -> list[bool]:
        await self._records.delete(call.keys)
        self._quotas.shares.gone(call.keys)
        self.counts["deleted_pages"] += call.num_keys
        return [True] * call.num_keys

    async def _touch(self, call: Call) -> list[bool]:
        self._quotas.used(call.keys)
        await self._records.touch(call.keys)
        return [True] * call.num_keys

    # ------------------------------------------------------------ helpers

    def _views(self, call: Call) -> list[memoryview]:
        nbytes, memory = self._codec.page_nbytes, self._memory
        return [memory[slot * nbytes : (slot + 1) * nbytes] for slot in call.slots]

    async def _off_loop(
        self, function: Callable[[Batch, *_Args], None], batch: Batch, *args: *_Args
    ) -> None:
        """Call a function that reads every page: in a worker, if that takes a while."""
        if len(batch.pages) * self._codec.page_nbytes <= INLINE_NBYTES:
            function(batch, *args)
        else:
            await self._workers.run(function, batch, *args)
