"""A backend that fails on demand: for tests of whatever has to live with backends.

Nothing sleeps. What is delayed or hangs goes on when the test says so.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar, cast

from typing_extensions import Buffer

from hicache.errors import StorageFull, StorageUnavailable
from hicache.keys import PageKey
from hicache.storage import StorageBackend, StorageStats

_Answer = TypeVar("_Answer")

_TRAITS = ("is_shared", "outlives_process", "evicts_itself", "max_batch", "alignment")
_MOST_TURNS = 20
"""Of the loop, for a call that is delayed."""

Method = Literal["open", "close", "get", "put", "contains", "delete", "touch", "scan", "stats"]

Tamper = Callable[[bytes, Random], bytes | None]
"""Turns a record into what is found instead; ``None`` loses it."""


class Gate:
    """Where a call waits until the test opens the gate. Made and opened in any thread."""

    def __init__(self) -> None:
        self._is_open = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._lock = threading.Lock()
        self._reached = threading.Event()

    def open(self) -> None:
        """Let everybody through, now and later."""
        with self._lock:
            self._is_open = True
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with suppress(RuntimeError):  # that the loop has ended
                loop.call_soon_threadsafe(future.set_result, None)

    @property
    def is_reached(self) -> bool:
        """Whether a call has come to the gate."""
        return self._reached.is_set()

    def wait_until_reached(self, timeout_s: float = 10.0) -> None:
        """Block until a call has come to the gate."""
        assert self._reached.wait(timeout_s), "no call came to the gate"

    async def pass_through(self, *, ignores_cancel: bool = False) -> None:
        """Wait until the gate is open. With ``ignores_cancel`` as a thread would: to the end."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._is_open:
                self._reached.set()
                return
            self._waiters.append((asyncio.get_running_loop(), future))
        self._reached.set()
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError:
                if not ignores_cancel:
                    raise


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in one call.

    In this order: the call waits at ``before``; raises ``error``; reads or writes what ``tamper``
    makes of its records; waits at ``after``, its work done; returns ``answer`` instead of its own.
    """

    before: Gate | None = None
    error: BaseException | None = None
    tamper: Tamper | None = None
    after: Gate | None = None
    answer: Callable[[object], object] | None = None
    """Given the right answer."""
    ignores_cancel: bool = False
    """Whether the gates are passed only when open, whatever is cancelled."""


@dataclass(frozen=True, slots=True)
class Chances:
    """How likely each fault is, drawn anew for every call and every record."""

    error: float = 0.0
    """Of a call: it raises one of ``errors``."""
    lost: float = 0.0
    """Of a record that is read: it is absent."""
    truncated: float = 0.0
    """Of a record that is read, as is the next."""
    flipped: float = 0.0
    torn: float = 0.0
    short: float = 0.0
    """Of a call that answers with a list: the last item is missing."""
    full: float = 0.0
    """Of a put."""
    delayed: float = 0.0
    """Of a call: others that come after it may be over before it begins."""
    hung: float = 0.0
    """Of a call: it waits at the backend's gate ``hung``, whatever is cancelled."""
    errors: Sequence[type[Exception]] = (OSError, RuntimeError, KeyError, StorageUnavailable)


class FaultyBackend(StorageBackend):
    """Another backend, with faults: set by the test for the next calls, and drawn by chance.

    Everything may be called from the test's thread while the backend is in use.
    """

    def __init__(
        self, inner: StorageBackend, *, seed: int = 0, chances: Chances | None = None
    ) -> None:
        self.inner = inner
        self.chances = chances or Chances()
        self.num_calls: Counter[Method] = Counter()
        """Calls to each method, faulty or not."""
        self.hung = Gate()
        """Where calls wait that hang by chance."""
        self._random = Random(seed)
        self._next: dict[Method, deque[Fault]] = {}
        self._at: dict[tuple[Method, int], Fault] = {}
        self._always: dict[Method, Fault] = {}
        for name in _TRAITS:
            setattr(self, name, getattr(inner, name))

    # ------------------------------------------------------------ for the test

    def next(self, method: Method, *faults: Fault) -> None:
        """Give the next calls of a method these faults, one each."""
        self._next.setdefault(method, deque()).extend(faults)

    def at(self, method: Method, number: int, fault: Fault) -> None:
        """Give a call of a method this fault: of those that come, the ``number``-th, from 0 on."""
        self._at[method, self.num_calls[method] + number] = fault

    def always(self, fault: Fault, *methods: Method) -> None:
        """Give every call of these methods this fault, until ``heal``."""
        self._always.update(dict.fromkeys(methods, fault))

    def heal(self) -> None:
        """Fail no more, neither by plan nor by chance. Gates stay as they are."""
        self._next.clear()
        self._at.clear()
        self._always.clear()
        self.chances = Chances()

    # ------------------------------------------------------------ the backend

    def is_there(self) -> bool:
        return self.inner.is_there()

    async def open(self, pool: Sequence[memoryview]) -> None:
        await self._before("open")
        await self.inner.open(pool)

    async def close(self) -> None:
        await self._before("close")
        await self.inner.close()

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        fault = await self._before("get")
        lengths = await self.inner.get(keys, into)
        tampers = [fault.tamper or self._drawn_tamper() for _ in keys]
        for index, tamper in enumerate(tampers):
            length = lengths[index]
            if tamper is not None and length is not None:
                lengths[index] = self._tamper_buffers(tamper, into[index], length)
        return await self._after(fault, lengths)

    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        fault = await self._before("put")
        if self._draw(self.chances.full):
            raise StorageFull("injected")
        if fault.tamper is not None:
            records = [(key, fault.tamper(b"".join(parts), self._random)) for key, parts in items]
            await self.inner.put([(key, [record]) for key, record in records if record is not None])
            accepted = [True] * len(items)
        else:
            accepted = await self.inner.put(items)
        return await self._after(fault, accepted)

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        fault = await self._before("contains")
        return await self._after(fault, await self.inner.contains(keys))

    async def delete(self, keys: Sequence[PageKey]) -> None:
        fault = await self._before("delete")
        await self.inner.delete(keys)
        await self._after(fault, None)

    async def touch(self, keys: Sequence[PageKey]) -> None:
        fault = await self._before("touch")
        await self.inner.touch(keys)
        await self._after(fault, None)

    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        fault = await self._before("scan")
        async for key, header in self.inner.scan(header_nbytes):
            found = fault.tamper(header, self._random) if fault.tamper else header
            if found is not None:
                yield key, found
        await self._after(fault, None)

    async def stats(self) -> StorageStats:
        fault = await self._before("stats")
        return await self._after(fault, await self.inner.stats())

    # ------------------------------------------------------------ faults

    async def _before(self, method: Method) -> Fault:
        fault = self._planned(method)
        self.num_calls[method] += 1
        if self._draw(self.chances.delayed):
            for _ in range(self._random.randrange(1, _MOST_TURNS)):
                await asyncio.sleep(0)
        if self._draw(self.chances.hung):
            await self.hung.pass_through(ignores_cancel=True)
        if fault.before is not None:
            await fault.before.pass_through(ignores_cancel=fault.ignores_cancel)
        if fault.error is not None:
            raise fault.error
        if self._draw(self.chances.error):
            raise self._random.choice(self.chances.errors)("injected")
        return fault

    def _planned(self, method: Method) -> Fault:
        at = self._at.pop((method, self.num_calls[method]), None)
        if at is not None:
            return at
        queued = self._next.get(method)
        return queued.popleft() if queued else self._always.get(method, Fault())

    async def _after(self, fault: Fault, answer: _Answer) -> _Answer:
        if fault.after is not None:
            await fault.after.pass_through(ignores_cancel=fault.ignores_cancel)
        if fault.answer is not None:
            # A lie on purpose: the type says what an honest backend returns.
            return cast("_Answer", fault.answer(answer))
        if isinstance(answer, list) and self._draw(self.chances.short):
            answer.pop()
        return answer

    def _draw(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance

    def _drawn_tamper(self) -> Tamper | None:
        if self._draw(self.chances.lost):
            return lose
        if self._draw(self.chances.truncated):
            return truncate
        if self._draw(self.chances.torn):
            return tear
        return flip if self._draw(self.chances.flipped) else None

    def _tamper_buffers(
        self, tamper: Tamper, buffers: Sequence[memoryview], length: int
    ) -> int | None:
        """Put the tampered record into the buffers; return its length."""
        found = tamper(b"".join(buffers)[:length], self._random)
        if found is None:
            return None
        rest = found
        for buffer in buffers:
            part = rest[: len(buffer)]
            buffer[: len(part)] = part
            rest = rest[len(part) :]
        return len(found)


def lose(record: bytes, random: Random) -> None:
    """Tamper: there is no such record."""


def truncate(record: bytes, random: Random) -> bytes:
    """Tamper: the record ends early."""
    return record[: random.randrange(len(record))]


def tear(record: bytes, random: Random) -> bytes:
    """Tamper: the record was not written to its end, but has its length."""
    end = random.randrange(len(record))
    return record[:end] + bytes(len(record) - end)


def flip(record: bytes, random: Random) -> bytes:
    """Tamper: one bit of the record is another."""
    changed = bytearray(record)
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)
