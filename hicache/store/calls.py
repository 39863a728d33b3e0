"""What a call does: the conversation with a backend, none of whose answers is believed.

Runs on the storage loop, except for what reads many pages (checksums): that goes to a worker
thread, one hop a batch.
"""

import asyncio
import logging
import mmap
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from hicache.codec import PageCodec
from hicache.errors import CorruptPage, StorageError, StorageUnavailable
from hicache.keys import NamespaceDigest, PageKey, PageRef
from hicache.storage import StorageBackend
from hicache.store.operations import Call, Kind

log = logging.getLogger(__name__)

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")

MAX_RETRIES = 3
FIRST_BACKOFF_S = 0.05
_NUM_WORKERS = 2
"""Threads that compute checksums, at 10 to 25 GB/s each: more would outrun any disk."""
INLINE_NBYTES = 64 << 20
"""Up to here checksums are computed on the loop: 3 ms at 25 GB/s. The way to a worker and back
takes two wake-ups, of 0.1 ms each, and of 5 ms beside a thread that is busy in Python."""


class WrongAnswer(StorageError):
    """A backend returned something that its contract rules out."""


class Caller:
    """Makes calls to one backend. All methods but the constructor belong to the loop thread."""

    def __init__(self, backend: StorageBackend, codec: PageCodec, memory: memoryview) -> None:
        assert len(memory) % codec.page_nbytes == 0
        self.counts: Counter[str] = Counter()
        """Pages and bytes that came to something, and pages that were not what they should be."""
        self._backend = backend
        self._codec = codec
        self._memory = memory
        self._headers = _Headers(backend.max_batch, codec.header_nbytes)
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, "hicache-checksum")
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
        self._workers.shutdown()

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
        _flags(await self._backend.contains([PageKey(bytes(32))]), 1)

    # ------------------------------------------------------------ reads

    async def _probe(self, call: Call) -> list[bool]:
        return _flags(await self._backend.contains(call.keys), call.num_keys)

    async def _fetch(self, call: Call) -> list[bool]:
        keys, views = call.keys, self._views(call)
        headers = self._headers.take()
        try:
            into = [[header, view] for header, view in zip(headers, views, strict=False)]
            lengths = _lengths(await self._backend.get(keys, into), len(keys))
            if call.is_given_up:
                return [False] * len(keys)
            identities = _identities(call)
            if len(keys) * self._codec.page_nbytes <= INLINE_NBYTES:
                good = self._verify(identities, headers, views, lengths)
            else:
                good = await self._in_worker(self._verify, identities, headers, views, lengths)
        finally:
            self._headers.give(headers)
        num_good = sum(good)
        self.counts["fetched_pages"] += num_good
        self.counts["read_nbytes"] += num_good * self._codec.record_nbytes
        self.counts["absent_pages"] += lengths.count(None)
        corrupt = [
            key
            for key, is_good, length in zip(keys, good, lengths, strict=True)
            if not is_good and length is not None
        ]
        if corrupt:
            await self._quarantine(corrupt)
        return good

    def _verify(
        self,
        identities: Sequence[tuple[PageRef, NamespaceDigest]],
        headers: Sequence[memoryview],
        views: Sequence[memoryview],
        lengths: Sequence[int | None],
    ) -> list[bool]:
        good = [False] * len(lengths)
        for index, length in enumerate(lengths):
            if length is None:
                continue
            page, namespace = identities[index]
            try:
                self._codec.verify(headers[index], views[index], page, namespace, length)
            except CorruptPage as error:
                log.debug("page %s: %s", page.key.hex(), error)
            else:
                good[index] = True
        return good

    async def _quarantine(self, keys: list[PageKey]) -> None:
        """Delete records that are not what they should be, before anyone is told of the miss.

        So a store that follows finds them gone, and writes them anew.
        """
        self.counts["corrupt_pages"] += len(keys)
        try:
            await self._backend.delete(keys)
        except BaseException as error:  # noqa: BLE001  the other pages of the batch are good
            self.counts["undeleted_pages"] += len(keys)
            log.debug("corrupt pages stay: %r", error)

    # ------------------------------------------------------------ writes

    async def _store(self, call: Call) -> list[bool]:
        keys = call.keys
        present = _flags(await self._backend.contains(keys), len(keys))
        missing = [index for index, is_present in enumerate(present) if not is_present]
        self.counts["present_pages"] += len(keys) - len(missing)
        if not missing or call.is_given_up:
            return present
        identities, views = _identities(call), self._views(call)
        identities = [identities[index] for index in missing]
        views = [views[index] for index in missing]
        headers = self._headers.take()
        try:
            if len(missing) * self._codec.page_nbytes <= INLINE_NBYTES:
                self._encode(identities, headers, views)
            else:
                await self._in_worker(self._encode, identities, headers, views)
            items = [
                (page.key, [header, view])
                for (page, _), header, view in zip(identities, headers, views, strict=False)
            ]
            accepted = _flags(await self._backend.put(items), len(items))
        finally:
            self._headers.give(headers)
        self.counts["stored_pages"] += sum(accepted)
        self.counts["written_nbytes"] += sum(accepted) * self._codec.record_nbytes
        for index, is_accepted in zip(missing, accepted, strict=True):
            present[index] = is_accepted
        return present

    def _encode(
        self,
        identities: Sequence[tuple[PageRef, NamespaceDigest]],
        headers: Sequence[memoryview],
        views: Sequence[memoryview],
    ) -> None:
        created_us = time.time_ns() // 1000
        for (page, namespace), header, view in zip(identities, headers, views, strict=False):
            self._codec.encode(header, view, page, namespace, created_us)

    async def _describe(self, call: Call) -> list[bool]:
        [part] = call.parts
        [key] = part.operation.keys
        if await self._probe(call) == [True]:
            return [True]
        return _flags(await self._backend.put([(key, part.operation.record)]), 1)

    async def _delete(self, call: Call) -> list[bool]:
        await self._backend.delete(call.keys)
        self.counts["deleted_pages"] += call.num_keys
        return [True] * call.num_keys

    async def _touch(self, call: Call) -> list[bool]:
        await self._backend.touch(call.keys)
        return [True] * call.num_keys

    # ------------------------------------------------------------ helpers

    def _views(self, call: Call) -> list[memoryview]:
        nbytes, memory = self._codec.page_nbytes, self._memory
        return [memory[slot * nbytes : (slot + 1) * nbytes] for slot in call.slots]

    async def _in_worker(self, function: Callable[[*_Args], _Result], *args: *_Args) -> _Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, function, *args)


class _Headers:
    """Buffers for the headers of a batch, used again and again.

    Each starts at a multiple of its length after a page boundary, so it is as aligned as the
    length is. A set goes back only when the backend's call has returned.
    """

    def __init__(self, max_batch: int, nbytes: int) -> None:
        self._max_batch = max_batch
        self._nbytes = nbytes
        self._free: list[list[memoryview]] = []

    def take(self) -> list[memoryview]:
        if self._free:
            return self._free.pop()
        arena = memoryview(mmap.mmap(-1, self._max_batch * self._nbytes))
        return [arena[start : start + self._nbytes] for start in range(0, len(arena), self._nbytes)]

    def give(self, headers: list[memoryview]) -> None:
        self._free.append(headers)


def _identities(call: Call) -> list[tuple[PageRef, NamespaceDigest]]:
    return [
        (page, part.operation.namespace)
        for part in call.parts
        for page in part.operation.pages[part.start : part.stop]
    ]


def _flags(answer: object, length: int) -> list[bool]:
    """Return the answer of a backend, if it is the list of booleans that it should be."""
    if not isinstance(answer, list) or len(answer) != length:
        raise WrongAnswer(f"asked for {length} booleans, got {_shape(answer)}")
    flags: list[bool] = [flag for flag in answer if isinstance(flag, bool)]
    if len(flags) != length:
        raise WrongAnswer("asked for booleans, got something else among them")
    return flags


def _lengths(answer: object, length: int) -> list[int | None]:
    """Return the answer of a backend, if it is the list of lengths that it should be."""
    if not isinstance(answer, list) or len(answer) != length:
        raise WrongAnswer(f"asked for {length} lengths, got {_shape(answer)}")
    lengths: list[int | None] = [
        item for item in answer if item is None or (isinstance(item, int) and item >= 0)
    ]
    if len(lengths) != length:
        raise WrongAnswer("asked for lengths, got something else among them")
    return lengths


def _shape(answer: object) -> str:
    return f"{len(answer)} items" if isinstance(answer, list) else type(answer).__name__
