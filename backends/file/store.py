"""A directory of record files that is open: what its threads do. Nothing here knows asyncio."""

import logging
import os
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from typing_extensions import Buffer

from hicache.backends.file.files import MINUTE_NS, Damaged, RecordFiles
from hicache.backends.file.ledger import Ledger, Totals
from hicache.codec import parse
from hicache.disk import directory, space
from hicache.disk.frame import FRAME_NBYTES, is_frame_of
from hicache.disk.options import DiskOptions
from hicache.disk.threads import Threads
from hicache.errors import CorruptPage, StorageFull
from hicache.keys import KEY_NBYTES, PageKey
from hicache.storage import StorageStats, StoredRecord

logger = logging.getLogger(__name__)

KIND = "file"
VERSION = 1
HIGH = 0.95
LOW = 0.85
_CLAIM_SUFFIX = ".claim"
_MOST_KNOWN = 1_000_000
_SLOW_S = 500e-6
"""Seconds a file. Below it files come from memory, and several threads, each of which lets go of
the GIL three times a file, would wait for that; above, they wait for the disk, or the network."""


_DEFAULT = DiskOptions()


class Store:
    """One directory, open. Any thread may call anything."""

    def __init__(
        self,
        path: Path,
        budget_nbytes: int,
        clock: Callable[[], float],
        options: DiskOptions = _DEFAULT,
    ) -> None:
        """Open or make it. Raises ``StorageError``."""
        self.num_evicted = 0
        self.num_lost = 0
        """Records that were found damaged when they were read."""
        self.num_stuck = 0
        """Files that could not be deleted to make room."""
        self.budget_nbytes = budget_nbytes
        self.files = RecordFiles(path)
        self._path = path
        self._clock = clock
        self._durability = options.durability
        self._keep_free_nbytes = options.keep_free_nbytes
        self._unsynced: set[PageKey] = set()
        """Written and not on the disk for certain, where that is to be so at intervals."""
        self._usage = path / "usage"
        self._preparing = threading.Lock()
        self._known: set[PageKey] = set()
        """Keys that were there when last seen; only a hint."""
        directory.prepare(path)
        is_usable = directory.claim(path, KIND, VERSION)
        if not is_usable:
            shutil.rmtree(self.files.objects, ignore_errors=True)
        self._make()
        num_swept = self.files.sweep()
        if num_swept:
            logger.info("%s: removed %d temporary files of a crash", path, num_swept)
        if num_swept or not is_usable:
            self._usage.unlink(missing_ok=True)
        self._ledger = Ledger(self._usage, self._count)
        held = self._ledger.totals().nbytes
        space.tell_if_too_large(path, budget_nbytes, held, self._keep_free_nbytes)

    def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]], threads: Threads
    ) -> list[int | None]:
        """Read records; return their lengths. Damaged files are deleted."""
        lengths: list[int | None] = [None] * len(keys)
        lost: list[tuple[PageKey, os.stat_result | None]] = []

        def read(position: int) -> None:
            key = keys[position]
            try:
                lengths[position] = self.files.read(key, into[position])
            except Damaged as damaged:
                lost.append((key, damaged.status))
            else:
                if lengths[position] is None:
                    lost.append((key, None))

        threads.share(read, range(len(keys)))
        self.forget(lost)
        return lengths

    def forget(self, lost: Sequence[tuple[PageKey, os.stat_result | None]]) -> None:
        """Take back what was believed of these keys; delete damaged files that are still there."""
        for key, status in lost:
            self._known.discard(key)
            nbytes = None if status is None else self.files.remove(key, status)
            if nbytes is not None:
                self.num_lost += 1
                with self._ledger.held() as totals:
                    totals.add(-nbytes, -1)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        found = [key in self._known or self.files.nbytes(key) is not None for key in keys]
        self._know(key for key, is_there in zip(keys, found, strict=True) if is_there)
        return found

    def put(
        self, items: Sequence[tuple[PageKey, Sequence[Buffer]]], threads: Threads
    ) -> list[bool]:
        """Write what is not there yet; return what is there afterwards."""
        self._prepare()
        is_held: dict[PageKey, bool] = {}
        fresh: list[tuple[PageKey, Sequence[Buffer], int]] = []
        for key, buffers in items:
            if key not in is_held:
                nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
                is_held[key] = self.files.nbytes(key) == nbytes
                if not is_held[key] and nbytes <= self.budget_nbytes // 2:
                    fresh.append((key, buffers, nbytes + FRAME_NBYTES))
        for group in self._groups(fresh):
            self._write(group, threads)
            is_held.update((key, True) for key, _, _ in group)
        self._know(key for key, is_there in is_held.items() if is_there)
        return [is_held[key] for key, _ in items]

    def sync(self) -> None:
        """Have on the disk what was put so far, data before names."""
        with self._preparing:
            keys, self._unsynced = self._unsynced, set()
        if keys:
            for key in keys:
                self.files.sync_bytes(key)
            self.files.sync_names(keys)

    def delete(self, keys: Sequence[PageKey]) -> None:
        """Remove records. Raises what the system says of the last that could not be removed."""
        nbytes = num_records = 0
        failed: OSError | None = None
        for key in keys:
            self._known.discard(key)
            try:
                removed = self.files.remove(key)
            except OSError as error:
                failed = error
                continue
            if removed is not None:
                nbytes, num_records = nbytes + removed, num_records + 1
        if num_records:
            with self._ledger.held() as totals:
                totals.add(-nbytes, -num_records)
        if failed is not None:
            raise failed

    def touch(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.files.touch(key, self._minute())

    def listed(self, shards: Sequence[str], nbytes: int, threads: Threads) -> list[StoredRecord]:
        """Return every record in these directories, damaged ones without their first bytes."""
        found: list[StoredRecord] = []

        def read(shard: str) -> None:
            for key, status in self.files.inside(shard):
                try:
                    with open(self.files.path(key), "rb", buffering=0) as file:
                        packed = file.read(FRAME_NBYTES + nbytes) or b""
                except FileNotFoundError:
                    continue
                length = status.st_size - FRAME_NBYTES
                is_whole = is_frame_of(packed[:FRAME_NBYTES], key, length)
                head = packed[FRAME_NBYTES:] if is_whole else None
                used = status.st_mtime_ns // MINUTE_NS * 60.0
                found.append(StoredRecord(key, head, max(length, 0), used))

        started = time.monotonic()
        for at, shard in enumerate(shards):
            read(shard)
            if time.monotonic() - started > _SLOW_S * (len(found) + 1):
                threads.share(read, shards[at + 1 :])
                break
        return found

    def stats(self) -> StorageStats:
        totals = self._ledger.totals()
        return StorageStats(
            totals.num_records,
            totals.nbytes,
            self.budget_nbytes,
            num_evicted=self.num_evicted,
            num_lost=self.num_lost,
            num_stuck=self.num_stuck,
        )

    def close(self) -> None:
        try:
            self.sync()
        except OSError as error:
            logger.warning("%s: not all of it is on the disk: %s", self._path, error)
        self._ledger.close()

    def _make(self) -> None:
        directory.prepare(self.files.objects)
        directory.prepare(self.files.temporary)

    def _prepare(self) -> None:
        """Make the directory again where somebody has removed it."""
        with self._preparing:
            if not self._ledger.is_in_place:
                logger.warning("%s: has been removed; starting empty", self._path)
                directory.prepare(self._path)
                directory.claim(self._path, KIND, VERSION)
                self._make()
                self._known.clear()
                self._ledger.open()

    def _minute(self) -> int:
        return int(self._clock() // 60)

    def _know(self, keys: Iterable[PageKey]) -> None:
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        self._known.update(keys)

    def _groups(
        self, fresh: Sequence[tuple[PageKey, Sequence[Buffer], int]]
    ) -> Iterator[list[tuple[PageKey, Sequence[Buffer], int]]]:
        """Yield parts of a batch that are small beside the budget, of one record at least."""
        group: list[tuple[PageKey, Sequence[Buffer], int]] = []
        nbytes = 0
        for one in fresh:
            if group and nbytes + one[2] > self.budget_nbytes // 16:
                yield group
                group, nbytes = [], 0
            group.append(one)
            nbytes += one[2]
        if group:
            yield group

    def _write(
        self, group: Sequence[tuple[PageKey, Sequence[Buffer], int]], threads: Threads
    ) -> None:
        """Write records within the budget. Raises ``StorageFull``, or what the system says."""
        minute = self._minute()
        claimed = sum(nbytes for _, _, nbytes in group)
        claim = self._claim(claimed)
        written: list[int] = []

        def write(one: tuple[PageKey, Sequence[Buffer], int]) -> None:
            key, buffers, nbytes = one
            is_synced = self._durability == "commit"
            self.files.write(key, buffers, minute, _number(buffers), is_synced)
            written.append(nbytes)

        try:
            threads.share(write, group)
        finally:
            with self._ledger.held() as totals:
                totals.add(sum(written) - claimed, len(written))
                claim.unlink(missing_ok=True)
        if self._durability == "commit":
            self.files.sync_names(key for key, _, _ in group)
        elif self._durability == "interval":
            with self._preparing:
                self._unsynced.update(key for key, _, _ in group)

    def _claim(self, nbytes: int) -> Path:
        """Set bytes aside; evict where they would not fit. A file says so, for who counts anew."""
        claim = self.files.reserve(f"{nbytes}{_CLAIM_SUFFIX}")
        with self._ledger.held() as totals:
            lacking = nbytes - space.room_nbytes(self._path, self._keep_free_nbytes)
            if totals.nbytes + nbytes > HIGH * self.budget_nbytes or lacking > 0:
                self._evict(totals, nbytes, max(lacking, 0))
            if nbytes > space.room_nbytes(self._path, self._keep_free_nbytes):
                raise StorageFull(f"{self._path}: its disk has less free than it is to keep")
            if totals.nbytes + nbytes > self.budget_nbytes:
                raise StorageFull(f"{self._path}: no room within its budget")
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            totals.add(nbytes, 0)
        return claim

    def _evict(self, totals: Totals, nbytes: int, lacking: int) -> None:
        """Count anew; if ``nbytes`` more do not fit indeed, delete the oldest records.

        So many that they fit below the low watermark; and where the disk lacks ``lacking`` bytes,
        those and a tenth of what there is.

        The lock is held: O(records), 10 us each on a local disk, once for a tenth of the budget.
        """
        names, sizes, times = bytearray(), array("q"), array("q")
        for shard in self.files.shards():
            for key, status in self.files.inside(shard):
                names += key
                sizes.append(status.st_size)
                times.append(status.st_mtime_ns)
        totals.nbytes, totals.num_records = sum(sizes) + self._claimed(), len(sizes)
        low = totals.nbytes
        if totals.nbytes + nbytes > HIGH * self.budget_nbytes:
            low = int(LOW * self.budget_nbytes) - nbytes
        if lacking:
            low = min(low, int((1 - HIGH + LOW) * totals.nbytes) - lacking)
        for position in np.argsort(np.frombuffer(times, np.int64), kind="stable").tolist():
            if totals.nbytes <= low:
                return
            start = position * KEY_NBYTES
            key = PageKey(bytes(names[start : start + KEY_NBYTES]))
            self._known.discard(key)
            try:
                self.files.remove(key)
            except OSError as error:
                self.num_stuck += 1
                logger.debug("%s: cannot be deleted: %s", self.files.path(key), error)
                continue
            self.num_evicted += 1
            totals.add(-sizes[position], -1)

    def _count(self) -> Totals:
        started = time.monotonic()
        sizes = [
            status.st_size
            for shard in self.files.shards()
            for _, status in self.files.inside(shard)
        ]
        logger.info(
            "%s: counted %d records in %.1f s", self._path, len(sizes), time.monotonic() - started
        )
        return Totals(sum(sizes) + self._claimed(), len(sizes))

    def _claimed(self) -> int:
        names = self.files.claims(_CLAIM_SUFFIX)
        words = [name.removesuffix(_CLAIM_SUFFIX).rpartition("~")[2] for name in names]
        return sum(int(word) for word in words if word.isdigit())


def _number(buffers: Sequence[Buffer]) -> int:
    """Return the page number that a record's header says; 0 where it says none."""
    try:
        return parse(buffers[0]).number if buffers else 0
    except CorruptPage:
        return 0
