"""Reads of a batch: records that lie one behind the other come with one ``preadv``.

A batch is cut into runs, and runs are shared out among the reader threads, since ``preadv``
lets go of the GIL. Every record's frame is read along with it and must be that record's; so a
stale or damaged index costs a miss and no more.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hicache.backends.lmdb.index import Entry
from hicache.backends.lmdb.segments import SegmentFiles
from hicache.disk.frame import FRAME_NBYTES, is_frame_of
from hicache.disk.threads import Threads
from hicache.disk.vector import IOV_MAX, limit, read_all
from hicache.keys import PageKey

MAX_GAP = 4096
"""Bytes between two records that are read for nothing rather than with another call."""
_LEAST_SHARE = 4 * 1024 * 1024
_SKIPPED = memoryview(bytearray(MAX_GAP))
"""Where gaps are read to, by all at once: nobody looks at it."""


class _Member(NamedTuple):
    """A record of a run."""

    position: int
    """In the batch."""
    entry: Entry
    frame: memoryview
    """What is read in place of its frame."""
    end: int
    """Where in the segment ends what is read of it."""


class _Run:
    """Records of one segment, in order, close enough for one call."""

    __slots__ = ("end", "members", "segment", "start", "vector")

    def __init__(self, segment: int, start: int) -> None:
        self.segment = segment
        self.start = start
        self.end = start
        self.members: list[_Member] = []
        self.vector: list[memoryview] = []


def read(
    files: SegmentFiles,
    keys: Sequence[PageKey],
    entries: Sequence[Entry | None],
    into: Sequence[Sequence[memoryview]],
    threads: Threads,
) -> list[bool]:
    """Read the records that have an entry; return which were there, whole and their own.

    With the help of idle threads; returns when nobody writes to a buffer any more.
    """
    is_intact = [False] * len(keys)

    def read_run(run: _Run) -> None:
        segment = run.segment
        try:
            with files.using(segment) as fd:
                end = run.start + read_all(fd, run.vector, run.start)
        except FileNotFoundError:
            return
        for position, entry, frame, needed in run.members:
            is_intact[position] = end >= needed and is_frame_of(
                frame, keys[position], entry.nbytes, segment, entry.offset
            )

    runs = _runs(entries, into, threads.num_threads)
    if sum([run.end - run.start for run in runs]) >= _LEAST_SHARE:
        threads.share(read_run, runs)
    else:  # with many short calls, threads wait for the GIL rather than for the disk
        for run in runs:
            read_run(run)
    return is_intact


def _runs(
    entries: Sequence[Entry | None], into: Sequence[Sequence[memoryview]], num_threads: int
) -> list[_Run]:
    """Return the runs of a batch. A hot path: some microseconds a record matter here."""
    ordered = sorted((one, position) for position, one in enumerate(entries) if one is not None)
    total = sum([one.nbytes for one, _ in ordered])
    most_nbytes = max(_LEAST_SHARE, total // num_threads + 1)
    frames = memoryview(bytearray(FRAME_NBYTES * len(ordered)))
    runs: list[_Run] = []
    run = None
    for at, (entry, position) in enumerate(ordered):
        segment, offset, nbytes, _, _ = entry
        buffers = into[position]
        room = sum([buffer.nbytes for buffer in buffers])
        if (
            run is None
            or segment != run.segment
            or not 0 <= (gap := offset - run.end) < MAX_GAP
            or offset + nbytes - run.start > most_nbytes
            or len(run.vector) + len(buffers) + 1 >= IOV_MAX
        ):
            run = _Run(segment, offset)
            runs.append(run)
        elif gap:
            run.vector.append(_SKIPPED[:gap])
        frame = frames[at * FRAME_NBYTES : (at + 1) * FRAME_NBYTES]
        run.vector.append(frame)
        run.vector += buffers if room == nbytes else limit(buffers, nbytes)
        run.end = offset + FRAME_NBYTES + min(nbytes, room)
        run.members.append(_Member(position, entry, frame, run.end))
    return runs
