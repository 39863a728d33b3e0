"""A backend beside a dict: every call goes to both, and every answer is compared.

What was put and not deleted is there, whole; unless it may have been evicted, or its put was
cancelled: then it is whole or absent, and once seen it stays.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Literal

from hicache.errors import StorageFull
from hicache.keys import PageKey
from hicache.testing.expecting import expect, expect_that
from hicache.testing.records import Subject, is_zero, key

NAMES = range(36)
MANY_NAMES = range(240)
"""Enough to fill a budget of 8 MiB nearly twice."""
_SIZES = (0, 1, 100, 4096, 70_000, 300_000)


class Model:
    """What a store must hold. Records are named by numbers; each number has one size."""

    def __init__(self, store: Subject, *, may_evict: bool) -> None:
        self.store = store
        self.names = MANY_NAMES if may_evict else NAMES
        self._may_evict = may_evict
        self._held: dict[int, Literal["certainly", "perhaps"]] = {}
        self._records: dict[int, bytes] = {}
        """Those that were made, since making them takes longest."""
        self._given_back: list[memoryview] = []
        """Buffers of reads that were cancelled, all zeros."""

    async def put(self, names: Sequence[int]) -> None:
        """Store records: all are accepted, where there is room."""
        try:
            accepted = await self.store.backend.put(self._items(names))
        except StorageFull:
            expect_that(self._may_evict, "put", "room: there is no budget", "StorageFull")
            self._held.update(dict.fromkeys(names, "perhaps"))
            return
        expect("what put returned", accepted, [True] * len(names))
        self._held.update(dict.fromkeys(names, "certainly"))

    async def get(self, names: Sequence[int]) -> None:
        """Read records: each is right, or absent where it may be."""
        buffers = [self.store.buffer(self._nbytes(name)) for name in names]
        lengths = await self.store.backend.get(
            [key(name) for name in names], [[one] for one in buffers]
        )
        expect("how many lengths get returned", len(lengths), len(names))
        for name, length, buffer in zip(names, lengths, buffers, strict=True):
            self._saw(name, length is not None, "get")
            if length is not None:
                self._compare(name, bytes(buffer[:length]))

    async def contains(self, names: Sequence[int]) -> None:
        """Ask for records."""
        found = await self.store.contains(*names)
        expect("how many answers contains returned", len(found), len(names))
        for name, is_there in zip(names, found, strict=True):
            self._saw(name, is_there, "contains")

    async def delete(self, names: Sequence[int]) -> None:
        """Remove records: they are gone."""
        await self.store.delete(*names)
        for name in names:
            self._held.pop(name, None)

    async def touch(self, names: Sequence[int]) -> None:
        """Count records as used: nothing else changes."""
        await self.store.backend.touch([key(name) for name in names])

    async def scan(self) -> None:
        """Look at everything there is."""
        by_key = {key(name): name for name in MANY_NAMES}
        found = await self.store.scan(16)
        expect("records that scan yielded twice", len(found) - len(dict(found)), 0)
        for found_key, header in found:
            expect_that(found_key in by_key, "scan", "no key but those that were put", found_key)
            name = by_key[found_key]
            expect_that(name in self._held, "scan", f"no record {name}: it is not there", "one")
            expect(f"the start of record {name}", header, self._record(name)[:16])
        for name in list(self._held):
            self._saw(name, key(name) in dict(found), "scan")

    async def stats(self) -> None:
        """Count."""
        num_records = (await self.store.backend.stats()).num_records
        most = len(self._held)
        is_exact = not self._may_evict and "perhaps" not in self._held.values()
        least = most if is_exact else 0
        expected = f"{least} to {most}"
        expect_that(least <= num_records <= most, "stats().num_records", expected, num_records)

    async def reopen(self) -> None:
        """Open the store anew."""
        await self.store.reopen()

    async def cancelled_get(self, names: Sequence[int], num_turns: int) -> None:
        """Cancel a read after some turns of the loop: its buffers are ours again then."""
        buffers = [self.store.buffer(self._nbytes(name)) for name in names]
        call = self.store.backend.get([key(name) for name in names], [[one] for one in buffers])
        await _cancelled_after(call, num_turns)
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))
        self._given_back = [*self._given_back, *buffers][-16:]

    async def cancelled_put(self, names: Sequence[int], num_turns: int) -> None:
        """Cancel a write after some turns of the loop: each record is whole or absent then."""
        items = self._items(names)
        with suppress(StorageFull):
            await _cancelled_after(self.store.backend.put(items), num_turns)
        for _, (source,) in items:
            source[:] = bytes(len(source))
        for name in names:
            self._held.setdefault(name, "perhaps")

    def check(self) -> None:
        """Expect that nobody writes to what was given back."""
        num_written = sum(not is_zero(buffer) for buffer in self._given_back)
        expect("buffers of cancelled reads that were written to afterwards", num_written, 0)

    def _saw(self, name: int, is_there: bool, method: str) -> None:
        state = self._held.get(name)
        if is_there:
            expect_that(state is not None, method, f"no record {name}: it is not there", "one")
            self._held[name] = "certainly"
        elif self._may_evict:
            self._held.pop(name, None)
        else:
            is_right = state != "certainly"
            expect_that(is_right, method, f"record {name}: it was put, and not deleted", "none")
            self._held.pop(name, None)

    def _compare(self, name: int, found: bytes) -> None:
        expect(f"record {name}", found, self._record(name))

    def _nbytes(self, name: int) -> int:
        return _SIZES[name % len(_SIZES)]

    def _record(self, name: int) -> bytes:
        known = self._records.get(name)
        if known is None:
            known = self._records[name] = self.store.record(name, self._nbytes(name))
        return known

    def _items(self, names: Sequence[int]) -> list[tuple[PageKey, list[memoryview]]]:
        sources = [self.store.buffer(self._nbytes(name)) for name in names]
        for name, source in zip(names, sources, strict=True):
            source[:] = self._record(name)
        return [(key(name), [source]) for name, source in zip(names, sources, strict=True)]


async def _cancelled_after(call: Awaitable[Any], num_turns: int) -> None:
    task = asyncio.ensure_future(call)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
