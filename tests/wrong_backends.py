"""Backends that are wrong in one way each, and what must notice it.

All are right but for that: a dict, with ``asyncio.sleep(0)`` where a real one would wait.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

from hicache.errors import StorageError
from hicache.keys import PageKey
from hicache.storage import StorageStats, StoredRecord
from tests.right_backend import CAUGHT_BY as CAUGHT_BY
from tests.right_backend import WRONG as WRONG
from tests.right_backend import Buffers, Items, Right, caught_by

# ---------------------------------------------------------------- get


@caught_by("values_come_back_in_the_order_asked")
class ReturnsShort(Right):
    async def get(self, keys: Sequence[PageKey], into: Buffers) -> list[int | None]:
        return [length for length in await super().get(keys, into) if length is not None]


@caught_by("a_missing_key_is_none_and_no_error")
class RaisesOnAbsence(Right):
    def read(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        self.held[key]
        return super().read(key, buffers)


@caught_by("values_come_back_in_the_order_asked")
class SortsItsBatch(Right):
    async def get(self, keys: Sequence[PageKey], into: Buffers) -> list[int | None]:
        return await super().get(sorted(keys), into)


@caught_by("a_key_asked_twice_in_a_batch_is_read_twice")
class ReadsEachKeyOnce(Right):
    async def get(self, keys: Sequence[PageKey], into: Buffers) -> list[int | None]:
        last = dict(zip(keys, into, strict=True))
        lengths = {key: self.read(key, buffers) for key, buffers in last.items()}
        return [lengths[key] for key in keys]


@caught_by("a_record_is_scattered_over_its_buffers")
class FillsTheFirstBufferOnly(Right):
    def read(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        return super().read(key, buffers[:1])


@caught_by("a_record_is_scattered_over_its_buffers")
class StartsEachBufferAnew(Right):
    def read(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        return [Right.read(self, key, [buffer]) for buffer in buffers][-1]


@caught_by("a_record_may_be_shorter_than_its_buffers")
class ReturnsTheRoomThereWas(Right):
    def read(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        length = super().read(key, buffers)
        return None if length is None else max(length, sum(map(len, buffers)))


@caught_by("a_record_longer_than_its_buffers_fills_them")
class ReturnsWhatItRead(Right):
    def read(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        length = super().read(key, buffers)
        return None if length is None else min(length, sum(map(len, buffers)))


@caught_by("a_large_record_comes_back_whole")
class CutsLargeRecords(Right):
    async def put(self, items: Items) -> list[bool]:
        cut = [(key, [b"".join(parts)[: 8 * 1024 * 1024]]) for key, parts in items]
        return await super().put(cut)


@caught_by("a_batch_may_have_max_batch_keys")
class RefusesFullBatches(Right):
    async def get(self, keys: Sequence[PageKey], into: Buffers) -> list[int | None]:
        if len(keys) > 100:
            raise StorageError("too many keys")
        return await super().get(keys, into)


@caught_by("it_speaks_this_version_of_the_contract")
class SpeaksAnother(Right):
    contract_version: ClassVar[int] = 99


@caught_by("empty_batches_do_nothing")
class RaisesOnNothing(Right):
    async def get(self, keys: Sequence[PageKey], into: Buffers) -> list[int | None]:
        assert keys[0]
        return await super().get(keys, into)


# ---------------------------------------------------------------- put


@caught_by("a_record_comes_back")
class SaysNothingWhenItPuts(Right):
    async def put(self, items: Items) -> list[bool]:
        await super().put(items)
        return []


@caught_by("a_record_is_the_concatenation_of_its_buffers")
class StoresThePageOnly(Right):
    async def put(self, items: Items) -> list[bool]:
        return await super().put([(key, parts[-1:]) for key, parts in items])


@caught_by("a_key_put_twice_in_a_batch_is_one_record")
class RefusesDuplicates(Right):
    async def put(self, items: Items) -> list[bool]:
        before = [key in [seen for seen, _ in items[:at]] for at, (key, _) in enumerate(items)]
        await super().put(items)
        return [not is_double for is_double in before]


@caught_by("putting_a_key_again_is_accepted")
class RefusesKnownKeys(Right):
    async def put(self, items: Items) -> list[bool]:
        known = set(self.held)
        await super().put(items)
        return [key not in known for key, _ in items]


@caught_by("the_source_may_change_once_put_has_returned")
class KeepsTheSource(Right):
    async def put(self, items: Items) -> list[bool]:
        self.held.update({key: memoryview(parts[-1]) for key, parts in items})  # type: ignore[misc]
        self.evict()
        return [True] * len(items)


@caught_by("concurrent_calls_see_records_whole_or_absent")
class PutsByHalves(Right):
    async def put(self, items: Items) -> list[bool]:
        joined = [(key, b"".join(parts)) for key, parts in items]
        for key, record in joined:
            self.held[key] = record[: len(record) // 2] + bytes(len(record) - len(record) // 2)
            await asyncio.sleep(0)
            self.held[key] = record
        self.evict()
        return [True] * len(items)


@caught_by("a_cancelled_put_leaves_records_whole_or_absent")
class ReadsTheSourceLate(Right):
    async def put(self, items: Items) -> list[bool]:
        def late() -> None:
            time.sleep(0.003)
            self.held.update((key, b"".join(parts)) for key, parts in items)

        await asyncio.to_thread(late)
        self.evict()
        return [True] * len(items)


# ---------------------------------------------------------------- cancelled, blocked


@caught_by("a_cancelled_get_has_let_go_of_its_buffers")
class WritesAfterCancel(Right):
    async def get(self, keys: Sequence[PageKey], into: Buffers) -> list[int | None]:
        def late() -> list[int | None]:
            time.sleep(0.003)
            return [Right.read(self, key, one) for key, one in zip(keys, into, strict=True)]

        return await asyncio.to_thread(late)


@caught_by("a_cancelled_get_has_let_go_of_its_buffers")
class WritesMuchLater(Right):
    async def get(self, keys: Sequence[PageKey], into: Buffers) -> list[int | None]:
        try:
            return await super().get(keys, into)
        except asyncio.CancelledError:
            threading.Timer(0.03, self._scribble, [into]).start()
            raise

    def _scribble(self, into: Buffers) -> None:
        for buffers in into:
            for buffer in buffers:
                buffer[:] = b"\x77" * len(buffer)


@caught_by("a_call_that_was_cancelled_spoils_no_other")
class BreaksWhenCancelled(Right):
    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        held, self.held = self.held, {}
        await asyncio.sleep(0)
        self.held = held
        return await super().contains(keys)


@caught_by("the_loop_turns_while_a_call_runs")
class BlocksTheLoop(Right):
    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        if len(keys) == 8:
            time.sleep(0.15)
        return await super().contains(keys)


@caught_by("closing_twice_is_harmless")
class ClosesOnce(Right):
    async def close(self) -> None:
        del self.path


# ---------------------------------------------------------------- the rest


@caught_by("a_deleted_record_is_absent_and_others_stay")
class RaisesOnDeletingNothing(Right):
    async def delete(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            del self.held[key]


@caught_by("a_deleted_record_can_be_put_again")
class RemembersTheDead(Right):
    async def delete(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            if key in self.held:
                self.held[key] = b""

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [bool(self.held.get(key)) for key in keys]

    def read(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        return super().read(key, buffers) or None

    async def put(self, items: Items) -> list[bool]:
        return await super().put([item for item in items if item[0] not in self.held])


@caught_by("contains_answers_in_order_and_for_duplicates")
class ContainsASet(Right):
    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [key in self.held for key in dict.fromkeys(keys)]


@caught_by("touch_changes_no_record")
class TouchMakesRecords(Right):
    async def touch(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.held[key] = self.held.pop(key, b"")


@caught_by("scan_yields_the_start_of_every_record")
class ScanMissesRecords(Right):
    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        for key, record in list(self.held.items())[:256]:
            yield key, record[:header_nbytes]


@caught_by("scan_yields_the_start_of_every_record")
class ScanYieldsWholeRecords(Right):
    async def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        for key, record in list(self.held.items()):
            yield key, record


@caught_by("records_tell_what_scan_does_and_no_wrong_length")
class TellsTheLengthOfTheHead(Right):
    async def records(self, head_nbytes: int) -> AsyncIterator[StoredRecord]:
        async for key, head in self.scan(head_nbytes):
            yield StoredRecord(key, head, len(head))


@caught_by("stats_count_records_and_bytes")
class CountsTheDeleted(Right):
    num_put = 0

    async def put(self, items: Items) -> list[bool]:
        self.num_put += len({key for key, _ in items} - set(self.held))
        return await super().put(items)

    async def stats(self) -> StorageStats:
        honest = await super().stats()
        return StorageStats(self.num_put, honest.nbytes)


@caught_by("records_outlive_the_process")
class LosesOnReopen(Right):
    async def open(self, pool: Sequence[memoryview]) -> None:
        self.held = {}


@caught_by("records_outlive_the_process")
class ForgetsDeletesOnReopen(Right):
    def __init__(self, path: Path, budget_nbytes: int) -> None:
        super().__init__(path, budget_nbytes)
        self.gone: set[PageKey] = set()

    async def delete(self, keys: Sequence[PageKey]) -> None:
        self.gone.update(keys)
        self.stores.setdefault(self.path / "old", {}).update(
            (key, self.held.pop(key)) for key in keys if key in self.held
        )

    async def open(self, pool: Sequence[memoryview]) -> None:
        await super().open(pool)
        self.held.update(self.stores.pop(self.path / "old", {}))


@caught_by("a_store_that_was_opened_anew_can_be_written")
class WritesOnlyWhatIsNew(Right):
    async def close(self) -> None:
        self.stores[self.path] = dict(list(self.held.items())[:1] or self.held)

    async def open(self, pool: Sequence[memoryview]) -> None:
        self.held = dict(self.stores.get(self.path, {}))


@caught_by("an_empty_store_opens_again")
class OpensNothingTwice(Right):
    async def open(self, pool: Sequence[memoryview]) -> None:
        if self.stores.get(self.path) == {}:
            raise StorageError("there is a store, and nothing in it")
        await super().open(pool)


@caught_by("random_calls_and_restarts_agree_with_a_dict")
class LosesEmptyRecordsOnReopen(Right):
    async def open(self, pool: Sequence[memoryview]) -> None:
        await super().open(pool)
        for key in [key for key, record in self.held.items() if not record]:
            del self.held[key]


@caught_by("random_calls_within_a_budget_agree_with_a_dict")
class ContainsTheEvicted(Right):
    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [key in self.held or self.num_evicted > 0 for key in keys]


@caught_by("a_budget_holds_however_much_is_put")
class IgnoresItsBudget(Right):
    def evict(self) -> None:
        pass


@caught_by("a_budget_holds_however_much_is_put")
class StopsWhenFull(Right):
    async def put(self, items: Items) -> list[bool]:
        if sum(map(len, self.held.values())) > self.budget_nbytes - 2 * 1024 * 1024:
            return [False] * len(items)
        return await super().put(items)


@caught_by("eviction_leaves_records_whole_or_absent")
class EvictsByHalves(Right):
    def evict(self) -> None:
        for key, record in list(self.held.items()):
            if sum(map(len, self.held.values())) <= self.budget_nbytes:
                return
            self.held[key] = record[: len(record) // 2]
            self.num_evicted += 1


@caught_by("an_empty_record_is_a_record")
class ForgetsEmptyRecords(Right):
    def read(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        return super().read(key, buffers) or None


@caught_by("random_calls_agree_with_a_dict")
class DropsEverySeventhPut(Right):
    num_puts = 0

    async def put(self, items: Items) -> list[bool]:
        self.num_puts += 1
        return [True] * len(items) if self.num_puts % 7 == 0 else await super().put(items)


# ---------------------------------------------------------------- for the command


class CannotOpen(Right):
    async def open(self, pool: Sequence[memoryview]) -> None:
        raise StorageError("no server there")


class RaisesInOpen(Right):
    async def open(self, pool: Sequence[memoryview]) -> None:
        self.num_evicted //= 0


class InUse(Right):
    async def open(self, pool: Sequence[memoryview]) -> None:
        self.held = {PageKey(bytes(32)): b"somebody's"}


class OneForAll(Right):
    """As a server would: its records have nothing to do with the directory."""

    one: ClassVar[dict[PageKey, bytes]] = {}

    async def open(self, pool: Sequence[memoryview]) -> None:
        self.held = self.one


class HangsForEver(Right):
    async def touch(self, keys: Sequence[PageKey]) -> None:
        await asyncio.to_thread(threading.Event().wait)
