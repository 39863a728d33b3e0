"""Which segments to give up when the store is nearly full, and how.

Space comes back a segment at a time. The oldest records by (stamp, -page number) are to go:
tails before heads. Segments in which few others live go first, and those others are copied
forward; where that is not enough, segments whose records are oldest on the whole. Never more
than half a segment is copied, so that each victim gives back at least the other half.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hicache.backends.lmdb.index import Entry, Index, Segment, Snapshot, entries_of
from hicache.backends.lmdb.segments import SegmentFiles, is_in_use
from hicache.backends.lmdb.writing import Appender, Placed, Record
from hicache.disk.frame import FRAME_NBYTES, unpack
from hicache.keys import PageKey

logger = logging.getLogger(__name__)

HIGH = 0.95
LOW = 0.85
_FORGET_BATCH = 256
"""Records a transaction: LMDB copies each page that one changes, and has little room for that."""
_COPY_NBYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Victim:
    """A segment to give up, with the records it had when that was decided."""

    segment: int
    records: Sequence[tuple[PageKey, Entry]]
    kept: frozenset[PageKey]
    """Those to copy forward."""


def plan(
    snapshot: Snapshot, candidates: Mapping[int, Segment], nbytes: int, num_records: int
) -> list[Victim]:
    """Return victims, best first, that give back ``nbytes`` and ``num_records`` if that can be.

    O(n log n) of the records, in NumPy.
    """
    records = _Records(snapshot.entries)
    is_old = records.oldest([*candidates], nbytes, num_records)
    choices = [
        _weigh(records, is_old, segment, known.capacity) for segment, known in candidates.items()
    ]
    victims: list[Victim] = []
    for choice in sorted(choices, key=lambda one: (one.is_costly, one.score)):
        if nbytes <= 0 and num_records <= 0:
            break
        kept = frozenset(snapshot.keys[position] for position in choice.kept.tolist())
        victims.append(Victim(choice.segment, entries_of(snapshot, choice.records), kept))
        nbytes -= choice.gain
        num_records -= len(choice.records) - len(choice.kept)
    return victims


class _Records:
    """All records of a store, by age and by segment. Positions are those of the snapshot."""

    def __init__(self, entries: NDArray[np.void]) -> None:
        depth = entries["number"].astype(np.int64)
        self.by_age = np.lexsort((-depth, entries["stamp"]))
        """Positions, oldest first; of equally old ones the tail first."""
        self.rank = np.empty(len(entries), np.int64)
        """Of each record, its place in that order."""
        self.rank[self.by_age] = np.arange(len(entries))
        self.nbytes = entries["nbytes"].astype(np.int64) + FRAME_NBYTES
        self._segments = entries["segment"]
        self._by_segment = np.argsort(self._segments, kind="stable")
        self._sorted_segments = self._segments[self._by_segment]

    def oldest(self, segments: Sequence[int], nbytes: int, num_records: int) -> NDArray[np.bool_]:
        """Return which records of these segments are to go: the oldest, as many as are asked."""
        is_theirs = np.isin(self._segments[self.by_age], np.array(segments, np.uint64))
        theirs = self.by_age[is_theirs]
        older_nbytes = np.cumsum(self.nbytes[theirs]) - self.nbytes[theirs]
        older_count = np.arange(len(theirs))
        is_old = np.zeros(len(self.nbytes), bool)
        is_old[theirs[(older_nbytes < nbytes) | (older_count < num_records)]] = True
        return is_old

    def inside(self, segment: int) -> NDArray[np.intp]:
        """Return the positions of the records in a segment."""
        name = np.uint64(segment)
        first = np.searchsorted(self._sorted_segments, name)
        last = np.searchsorted(self._sorted_segments, name, "right")
        return self._by_segment[first:last]


@dataclass(frozen=True, slots=True)
class _Choice:
    """What giving up a segment would mean."""

    is_costly: bool
    """Whether records would go that are not among the oldest."""
    score: float
    """Which of two equally costly ones goes first: the lower."""
    segment: int
    gain: int
    """Bytes that it gives back."""
    records: NDArray[np.intp]
    kept: NDArray[np.intp]


def _weigh(records: _Records, is_old: NDArray[np.bool_], segment: int, capacity: int) -> _Choice:
    """Say what giving up a segment would mean, where the old records are to go.

    The young ones are copied forward, the youngest first, up to half the segment. A segment with
    more of them is costly, and goes by the age of what it holds; others by how little is copied.
    """
    inside = records.inside(segment)
    young = inside[~is_old[inside]]
    young = young[np.argsort(-records.rank[young])]
    kept = young[np.cumsum(records.nbytes[young]) <= capacity // 2]
    gain = capacity - int(records.nbytes[kept].sum())
    if len(kept) < len(young):
        return _Choice(True, float(records.rank[inside].mean()), segment, gain, inside, kept)
    share = int(records.nbytes[young].sum()) / max(capacity, 1)
    return _Choice(False, share, segment, gain, inside, kept)


class Evictor:
    """Gives up segments of one store. One thread only; other processes may do the same."""

    def __init__(self, files: SegmentFiles, index: Index, appender: Appender) -> None:
        self.num_evicted = 0
        self.num_stuck = 0
        """Victims that could not be deleted; they are left alone until the next start."""
        self._files = files
        self._index = index
        self._appender = appender
        self._stuck: set[int] = set()
        self._planned: list[Victim] = []

    def make_room(self, capacity: int, segment_nbytes: int, budget_nbytes: int) -> bool:
        """Give up segments until another of ``capacity`` fits below the high watermark.

        One more is given up while the low watermark has not been reached, so that the work is
        spread over the writes to come. Returns whether there is room now.
        """
        high, low = int(HIGH * budget_nbytes), int(LOW * budget_nbytes)
        may_plan = True
        reserved, num_records = self._held()
        while reserved + capacity > high or num_records > self._index.max_records:
            if not self._planned and may_plan:
                excess = num_records - int(LOW * self._index.max_records)
                self._plan(reserved + capacity - low, excess if self.is_crowded else 0)
                may_plan = False
            if not self._planned:
                break
            self._give_up(self._planned.pop(0), segment_nbytes, budget_nbytes)
            reserved, num_records = self._held()
        if self._planned:
            self._give_up(self._planned.pop(0), segment_nbytes, budget_nbytes)
            reserved, num_records = self._held()
        return reserved + capacity <= budget_nbytes and num_records <= self._index.max_records

    def give_way(self, nbytes: int, segment_nbytes: int) -> None:
        """Give up the oldest segments, for others who need so much of the disk.

        Nothing is copied forward: there is no room for that.
        """
        self._plan(nbytes, 0)
        while self._planned and nbytes > 0:
            victim = self._planned.pop(0)
            nbytes -= self._nbytes(victim.segment)
            self._give_up(replace(victim, kept=frozenset()), segment_nbytes, budget_nbytes=0)
        self._planned.clear()

    @property
    def is_crowded(self) -> bool:
        """Whether there are more records than the index is made for."""
        with self._index.view() as view:
            return view.num_records > self._index.max_records

    def _held(self) -> tuple[int, int]:
        with self._index.view() as view:
            return sum(one.capacity for one in view.segments().values()), view.num_records

    def _plan(self, nbytes: int, num_records: int) -> None:
        candidates: dict[int, Segment] = {}
        with self._index.change() as change:
            for segment, known in change.segments().items():
                if segment == self._appender.segment or segment in self._stuck:
                    continue
                if known.capacity > known.used:
                    if is_in_use(self._files, segment):
                        continue
                    known = known._replace(capacity=min(known.capacity, self._nbytes(segment)))
                    change.put_segment(segment, known)
                candidates[segment] = known
        self._planned = plan(self._index.snapshot(), candidates, nbytes, num_records)

    def _nbytes(self, segment: int) -> int:
        try:
            return os.stat(self._files.path(segment)).st_size
        except OSError:
            return 0

    def _give_up(self, victim: Victim, segment_nbytes: int, budget_nbytes: int) -> None:
        path = self._files.path(victim.segment)
        now = self._index.look_up([key for key, _ in victim.records])
        live = [
            (key, entry, key in victim.kept or entry.stamp > planned.stamp)
            for (key, planned), entry in zip(victim.records, now, strict=True)
            if entry is not None and entry.segment == victim.segment
        ]
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            fd = None
        try:
            kept = [(key, entry) for key, entry, is_kept in live if is_kept]
            placed = [] if fd is None else self._copy(fd, kept, segment_nbytes, budget_nbytes)
            self._appender.sync()  # before the only other copy goes
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self.num_stuck += 1
                self._stuck.add(victim.segment)
                logger.warning("%s: cannot be deleted, left alone: %s", path, error.strerror)
                return
            self._forget(victim.segment, [key for key, _, _ in live], placed)
            if fd is not None:
                os.ftruncate(fd, 0)  # at once, also where another process has it open
        finally:
            if fd is not None:
                os.close(fd)
            self._files.drop(victim.segment)

    def _copy(
        self,
        fd: int,
        kept: Sequence[tuple[PageKey, Entry]],
        segment_nbytes: int,
        budget_nbytes: int,
    ) -> list[Placed]:
        """Append records of another segment to ours; those that do not fit are left out."""
        placed: list[Placed] = []
        records: list[Record] = []
        nbytes = 0
        for key, entry in sorted(kept, key=lambda one: one[1]):
            packed = os.pread(fd, FRAME_NBYTES + entry.nbytes, entry.offset)
            frame = unpack(packed[:FRAME_NBYTES], entry.segment, entry.offset)
            if frame is None or frame.key != key or len(packed) != FRAME_NBYTES + entry.nbytes:
                continue
            lead = -(entry.offset + FRAME_NBYTES) % 4096
            body = memoryview(packed)[FRAME_NBYTES:]
            record = Record(key, entry.nbytes, entry.number, entry.stamp, lead, [body])
            if nbytes + record.most_nbytes > self._appender.room():
                placed += self._append(records)
                records, nbytes = [], 0
            if record.most_nbytes > self._appender.room() and not self._appender.start(
                max(segment_nbytes, record.most_nbytes), budget_nbytes
            ):
                break
            records.append(record)
            nbytes += record.most_nbytes
            if nbytes >= _COPY_NBYTES:
                placed += self._append(records)
                records, nbytes = [], 0
        return placed + self._append(records)

    def _append(self, records: Sequence[Record]) -> list[Placed]:
        if not records:
            return []
        try:
            return self._appender.append(records)
        except OSError as error:
            logger.warning("records could not be copied forward: %s", error.strerror)
            return []

    def _forget(self, segment: int, keys: Sequence[PageKey], placed: Sequence[Placed]) -> None:
        moved = {one.key: one for one in placed}
        for start in range(0, len(keys), _FORGET_BATCH):
            with self._index.change() as change:
                entered: list[Placed] = []
                for key in keys[start : start + _FORGET_BATCH]:
                    entry = change.entry(key)
                    if entry is None or entry.segment != segment:
                        continue
                    if key in moved:
                        entered.append(moved[key])
                    else:
                        change.remove(key)
                        self.num_evicted += 1
                self._appender.enter(change, entered)
        with self._index.change() as change:
            change.remove_segment(segment)
