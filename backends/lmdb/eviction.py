"""Which segments to give up when the store is nearly full, and how.

Space comes back a segment at a time. The oldest records by (stamp, -page number) are to go:
tails before heads. Segments in which few others live go first, and those others are copied
forward; where that is not enough, segments whose records are oldest on the whole. Never more
than half a segment is copied, so that each victim gives back at least the other half.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    victims: list[Victim] = []
    choices = _choices(snapshot, candidates, nbytes, num_records)
    for choice in sorted(choices, key=lambda one: (one.is_costly, one.score)):
        if nbytes <= 0 and num_records <= 0:
            break
        kept = frozenset(snapshot.keys[position] for position in choice.kept.tolist())
        victims.append(Victim(choice.segment, entries_of(snapshot, choice.records), kept))
        nbytes -= choice.gain
        num_records -= len(choice.records) - len(choice.kept)
    return victims


@dataclass(frozen=True, slots=True)
class _Choice:
    """What giving up a segment would mean."""

    is_costly: bool
    """Whether records would go that are not among the oldest."""
    score: float
    segment: int
    gain: int
    """Bytes that it gives back."""
    records: NDArray[np.intp]
    kept: NDArray[np.intp]


def _choices(
    snapshot: Snapshot, candidates: Mapping[int, Segment], nbytes: int, num_records: int
) -> list[_Choice]:
    """Return what each candidate would give back, where the oldest records are to go."""
    entries = snapshot.entries
    order = np.lexsort((-entries["number"].astype(np.int64), entries["stamp"]))
    rank = np.empty(len(entries), np.int64)
    rank[order] = np.arange(len(entries))  # 0 is the oldest
    cost = entries["nbytes"].astype(np.int64) + FRAME_NBYTES
    is_old = np.zeros(len(entries), bool)
    ours = order[np.isin(entries["segment"][order], np.array([*candidates], np.uint64))]
    before = np.cumsum(cost[ours]) - cost[ours]
    is_old[ours[(before < nbytes) | (np.arange(len(ours)) < num_records)]] = True

    by_segment = np.argsort(entries["segment"], kind="stable")
    names = entries["segment"][by_segment]
    choices: list[_Choice] = []
    for segment, known in candidates.items():
        name = np.uint64(segment)
        first, last = np.searchsorted(names, name), np.searchsorted(names, name, "right")
        inside = by_segment[first:last]
        young = inside[~is_old[inside]]
        young = young[np.argsort(-rank[young])]  # youngest first
        fits = young[np.cumsum(cost[young]) <= known.capacity // 2]
        is_costly = len(fits) < len(young)
        share = int(cost[young].sum()) / max(known.capacity, 1)
        score = float(rank[inside].mean()) if is_costly else share
        gain = known.capacity - int(cost[fits].sum())
        choices.append(_Choice(is_costly, score, segment, gain, inside, fits))
    return choices


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
        reserved, num_records = self._held()
        high, low = int(HIGH * budget_nbytes), int(LOW * budget_nbytes)
        most_records = self._index.max_records
        is_planned = False
        while reserved + capacity > high or num_records > most_records or self._planned:
            is_needed = reserved + capacity > high or num_records > most_records
            if not self._planned:
                if is_planned:
                    break
                is_planned = True
                excess = num_records - int(LOW * most_records)
                self._plan(reserved + capacity - low, excess if num_records > most_records else 0)
                continue
            self._give_up(self._planned.pop(0), segment_nbytes, budget_nbytes)
            if not is_needed:
                break
            reserved, num_records = self._held()
        reserved, num_records = self._held()
        return reserved + capacity <= budget_nbytes and num_records <= most_records

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
