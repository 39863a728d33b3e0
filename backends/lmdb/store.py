"""A store that is open: what its threads do. Nothing here knows asyncio.

``LmdbBackend`` calls the reading methods from any thread of its own, the writing ones from one
thread. Other processes may have the same directory open.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from hicache.backends.lmdb import recovery
from hicache.backends.lmdb.eviction import Evictor
from hicache.backends.lmdb.index import (
    LOCK_NBYTES,
    Entry,
    Index,
    IndexLost,
    Snapshot,
    entries_of,
)
from hicache.backends.lmdb.reading import read
from hicache.backends.lmdb.segments import SegmentFiles
from hicache.backends.lmdb.writing import Appender, Placed, Record
from hicache.codec import parse
from hicache.disk import directory, space
from hicache.disk.frame import DEAD, FRAME_NBYTES, unpack
from hicache.disk.options import DiskOptions
from hicache.disk.threads import Threads
from hicache.disk.vector import nbytes_of
from hicache.errors import ConfigError, CorruptPage, StorageError, StorageFull, StorageUnavailable
from hicache.keys import PageKey
from hicache.storage import StorageStats, StoredRecord

logger = logging.getLogger(__name__)

KIND = "lmdb"
VERSION = 1
LEAST_NBYTES = 4 * 1024 * 1024
_MOST_RECORD_NBYTES = 2**32 - 1
_OPEN_TIMEOUT_S = 60.0
_OPEN_POLL_S = 0.02
_MOST_MOVES = 3
"""How often a record that is being read may be moved before it is passed over."""


_DEFAULT = DiskOptions()


class Store:
    """One directory, open."""

    def __init__(
        self,
        path: Path,
        budget_nbytes: int,
        clock: Callable[[], float],
        options: DiskOptions = _DEFAULT,
    ) -> None:
        """Open or make it; the first process to do so repairs it. Raises ``StorageError``."""
        if budget_nbytes < LEAST_NBYTES:
            raise ConfigError(f"{path}: a store needs {LEAST_NBYTES >> 20} MiB or more")
        self.num_lost = 0
        """Records that were found damaged or gone when they were read."""
        self._clock = clock
        self._keep_free_nbytes = options.keep_free_nbytes
        map_nbytes = min(max(budget_nbytes // 64, 1 << 20), 1 << 30) // 4096 * 4096
        self._whole_budget_nbytes = budget_nbytes
        self._budget_nbytes = budget_nbytes - map_nbytes - LOCK_NBYTES
        """What segments may take: the index has its share already."""
        self._segment_nbytes = min(max(budget_nbytes // 32, 256 << 10), 256 << 20)
        self._path = path
        directory.prepare(path)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._open(map_nbytes)
        except BaseException:
            os.close(self._lock)
            raise
        self._appender = Appender(self._files, self._index, options.durability)
        self._evictor = Evictor(self._files, self._index, self._appender)
        held = sum(self._files.found().values())
        space.tell_if_too_large(path, budget_nbytes, held, self._keep_free_nbytes)

    def _open(self, map_nbytes: int) -> None:
        is_first = _lock(self._lock, self._path)
        folder, index = self._path / "segments", self._path / "index"
        directory.prepare(folder)
        self._files = SegmentFiles(folder)
        if not is_first:
            if not directory.is_claimed(self._path, KIND, VERSION):
                raise StorageError(f"{self._path}: in use by a store of another kind or version")
            self._index = Index(index, 0)
            return
        is_usable = directory.claim(self._path, KIND, VERSION)
        recovery.sweep(self._path)
        recovery.discard_damaged(index, map_nbytes)
        if not is_usable:
            recovery.discard(index)
            for segment in self._files.found():
                self._files.path(segment).unlink()
        self._index = recovery.open_reconciled(index, map_nbytes, self._files)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def check_in_place(self) -> None:
        """Raise ``IndexLost`` where the directory is no longer the one that was opened."""
        if not self._index.is_at(self._path / "index"):
            raise IndexLost(f"{self._path}: has been removed")

    def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]], threads: Threads
    ) -> list[int | None]:
        """Read records; return their lengths. Those that are damaged or gone are forgotten."""
        entries = self._index.look_up(keys)
        is_intact = read(self._files, keys, entries, into, threads)
        found = zip(keys, entries, is_intact, strict=True)
        lost = [Placed(key, one) for key, one, is_good in found if one and not is_good]
        if lost:
            self._forget(lost)
        return [
            one.nbytes if one is not None and is_good else None
            for one, is_good in zip(entries, is_intact, strict=True)
        ]

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [entry is not None for entry in self._index.look_up(keys)]

    def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        """Append what is not there yet; return what is there afterwards."""
        self._files.drop_unlinked()
        self._appender.leave_removed()
        stamp = self._now()
        is_held: dict[PageKey, bool] = {}
        records: list[Record] = []
        entries = self._index.look_up([key for key, _ in items])
        for (key, buffers), entry in zip(items, entries, strict=True):
            if key in is_held:
                continue
            nbytes = nbytes_of(buffers)
            is_held[key] = entry is not None and self._is_whole(entry, nbytes)
            if not is_held[key]:
                lead = nbytes_of(buffers[:-1])
                records.append(Record(key, nbytes, _number(buffers), stamp, lead, buffers))
        if self._evictor.is_crowded:
            self._evictor.make_room(0, self._segment_nbytes, self._budget_nbytes)
        if records:
            self._keep_free()
        for group in self._fitting(records):
            placed = self._appender.append(group)
            with self._index.change() as change:
                self._appender.enter(change, placed)
            is_held.update((key, True) for key, _ in placed)
        if records and self._appender.durability == "commit":
            self._index.sync()
        return [is_held[key] for key, _ in items]

    def sync(self) -> None:
        """Have on the disk what was put so far, data before names."""
        self._appender.sync()
        self._index.sync()

    def delete(self, keys: Sequence[PageKey]) -> None:
        entries = self._index.look_up(keys)
        held = [Placed(key, one) for key, one in zip(keys, entries, strict=True) if one is not None]
        self._remove(dict(held))

    def touch(self, keys: Sequence[PageKey]) -> None:
        stamp = self._now()
        entries = self._index.look_up(keys)
        due = {key for key, one in zip(keys, entries, strict=True) if one and one.stamp != stamp}
        if not due:
            return
        with self._index.change() as change:
            for key in due:
                entry = change.entry(key)
                if entry is not None:
                    change.put(key, entry._replace(stamp=stamp))

    def snapshot(self) -> tuple[Snapshot, NDArray[np.intp]]:
        """Return every record, and the order in which they lie on disk."""
        snapshot = self._index.gather()
        return snapshot, np.lexsort((snapshot.entries["offset"], snapshot.entries["segment"]))

    def listed(
        self, snapshot: Snapshot, positions: NDArray[np.intp], nbytes: int, threads: Threads
    ) -> list[StoredRecord]:
        """Return those records of a snapshot that are still there, damaged ones without a head.

        What has been moved meanwhile is looked for in its new place.
        """
        found: list[StoredRecord] = []
        placed = [Placed(key, entry) for key, entry in entries_of(snapshot, positions)]
        for _ in range(_MOST_MOVES):
            heads = self._heads(placed, nbytes, threads)
            found += [head for head in heads if head.head is not None]
            unread = [one for one, head in zip(placed, heads, strict=True) if head.head is None]
            now = self._index.look_up([key for key, _ in unread])
            moved: list[Placed] = []
            for (key, before), entry in zip(unread, now, strict=True):
                if entry is not None and entry[:2] != before[:2]:
                    moved.append(Placed(key, entry))
                elif entry is not None and self._files.path(entry.segment).exists():
                    # Else it has gone: eviction deletes a segment before the index forgets it.
                    found.append(_stored(key, entry, None))
            placed = moved
        return found

    def _heads(self, placed: Sequence[Placed], nbytes: int, threads: Threads) -> list[StoredRecord]:
        """Return each record with its first bytes, where it is whole: its end is not read."""
        keys = [key for key, _ in placed]
        entries = [entry for _, entry in placed]
        sizes = {one: self._files.nbytes(one) for one in {entry.segment for entry in entries}}
        buffers = [memoryview(bytearray(min(nbytes, one.nbytes))) for one in entries]
        is_intact = read(self._files, keys, entries, [[buffer] for buffer in buffers], threads)
        return [
            _stored(key, one, bytes(buffer) if good and one.end <= sizes[one.segment] else None)
            for (key, one), buffer, good in zip(placed, buffers, is_intact, strict=True)
        ]

    def stats(self) -> StorageStats:
        nbytes = sum(self._files.found().values())
        for name in ("index", "index-lock"):
            nbytes += (self._path / name).stat().st_size
        with self._index.view() as view:
            num_records = view.num_records
        return StorageStats(
            num_records,
            nbytes,
            self._whole_budget_nbytes,
            num_evicted=self._evictor.num_evicted,
            num_lost=self._index.num_lost + self.num_lost,
            num_stuck=self._evictor.num_stuck,
        )

    def close(self) -> None:
        """Seal what is being written and let go. No other thread may use the store any more."""
        try:
            self._appender.seal()
            if self._appender.durability != "none":
                self._index.sync()
        except (StorageError, lmdb.Error, OSError) as error:
            logger.warning("%s: not sealed: %s", self._path, error)
        finally:
            self._files.close()
            self._index.close()
            os.close(self._lock)

    def _now(self) -> int:
        return int(self._clock() // 60)

    def _is_whole(self, entry: Entry, nbytes: int) -> bool:
        return entry.nbytes == nbytes and self._files.nbytes(entry.segment) >= entry.end

    def _fitting(self, records: Sequence[Record]) -> Iterator[list[Record]]:
        """Yield groups that fit into the open segment, opening segments as needed.

        A record that could never fit is left out. Raises ``StorageFull`` where no room can be
        made.
        """
        group: list[Record] = []
        nbytes = 0
        for record in records:
            if record.most_nbytes > min(self._budget_nbytes // 2, _MOST_RECORD_NBYTES):
                continue
            if group and nbytes + record.most_nbytes > self._appender.room():
                yield group
                group, nbytes = [], 0
            if record.most_nbytes > self._appender.room():
                self._make_room(record.most_nbytes)
            group.append(record)
            nbytes += record.most_nbytes
        if group:
            yield group

    def _make_room(self, nbytes: int) -> None:
        capacity = max(self._segment_nbytes, nbytes)
        has_room = self._evictor.make_room(capacity, self._segment_nbytes, self._budget_nbytes)
        if self._appender.room() >= nbytes:
            return  # what was copied forward has opened one
        if not has_room or not self._appender.start(capacity, self._budget_nbytes):
            raise StorageFull(f"{self._path}: no room within its budget")

    def _keep_free(self) -> None:
        """Give way where the disk has too little left; raise ``StorageFull`` if in vain."""
        lacking = -space.room_nbytes(self._path, self._keep_free_nbytes)
        if lacking > 0:
            self._evictor.give_way(lacking, self._segment_nbytes)
            if space.room_nbytes(self._path, self._keep_free_nbytes) < 0:
                raise StorageFull(f"{self._path}: its disk has less free than it is to keep")

    def _forget(self, lost: Sequence[Placed]) -> None:
        """Remove records that could not be read, unless they have been written again."""
        entries = self._index.look_up([key for key, _ in lost])
        same = {
            key: entry
            for (key, entry), now in zip(lost, entries, strict=True)
            if now is not None and now[:2] == entry[:2]
        }
        self.num_lost += len(same)
        self._remove(same)

    def _remove(self, held: dict[PageKey, Entry]) -> None:
        """Remove these entries, mark their frames dead, and delete segments left empty."""
        for key, entry in held.items():
            self._mark_dead(key, entry)
        emptied: list[int] = []
        with self._index.change() as change:
            for key, entry in held.items():
                now = change.entry(key)
                known = change.segment(entry.segment)
                if now is None or now[:2] != entry[:2] or known is None:
                    continue
                change.remove(key)
                known = known._replace(num_live=known.num_live - 1)
                change.put_segment(entry.segment, known)
                if known.num_live == 0 and known.capacity == known.used:
                    change.remove_segment(entry.segment)
                    emptied.append(entry.segment)
        for segment in emptied:
            self._files.path(segment).unlink(missing_ok=True)
            self._files.drop(segment)

    def _mark_dead(self, key: PageKey, entry: Entry) -> None:
        """Let no recovery find the record again. A frame that is not its own is left alone."""
        try:
            with self._files.using(entry.segment) as fd:
                packed = os.pread(fd, FRAME_NBYTES, entry.offset)
                frame = unpack(packed, entry.segment, entry.offset)
                if frame is not None and frame.key == key:
                    os.pwrite(fd, DEAD, entry.offset)
        except OSError as error:
            logger.debug("a deleted record was not marked: %s", error)


def _stored(key: PageKey, entry: Entry, head: bytes | None) -> StoredRecord:
    return StoredRecord(key, head, entry.nbytes, entry.stamp * 60.0)


def _number(buffers: Sequence[Buffer]) -> int:
    """Return the page number that a record's header says; 0 where it says none."""
    try:
        return parse(buffers[0]).number if buffers else 0
    except CorruptPage:
        return 0


def _lock(fd: int, path: Path) -> bool:
    """Take the store's lock; return whether no other process has the store open."""
    deadline = time.monotonic() + _OPEN_TIMEOUT_S
    while True:
        for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return kind == fcntl.LOCK_EX
        if time.monotonic() > deadline:
            raise StorageUnavailable(f"{path}: another process is still repairing it")
        time.sleep(_OPEN_POLL_S)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn what the system and LMDB raise into ``StorageError``."""
    try:
        yield
    except (lmdb.MapFullError, lmdb.DiskError) as error:
        raise StorageFull(f"{path}: index: {error}") from None
    except lmdb.ReadersFullError as error:
        raise StorageUnavailable(f"{path}: index: {error}") from None
    except lmdb.Error as error:
        raise IndexLost(f"{path}: index: {error}") from None
    except OSError as error:
        raise directory.storage_error(error, path) from None
