"""Reads of a batch: records that lie one behind the other come with one ``preadv``.

A batch is cut into runs, and runs are shared out among the reader threads, since ``preadv``
lets go of the GIL. Every record's frame is read along with it and must be that record's; so a
stale or damaged index costs a miss and no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.backends.lmdb.index import Entry
from hicache.backends.lmdb.segments import SegmentFiles
from hicache.disk.frame import FRAME_NBYTES, unpack
from hicache.disk.threads import Threads
from hicache.disk.vector import IOV_MAX, limit, nbytes_of, read_all
from hicache.keys import PageKey

MAX_GAP = 4096
"""Bytes between two records that are read for nothing rather than with another call."""
_LEAST_SHARE = 4 * 1024 * 1024


@dataclass(slots=True)
class Wanted:
    """A record to read, and how that went."""

    key: PageKey
    entry: Entry
    buffers: Sequence[memoryview]
    is_intact: bool = False


@dataclass(slots=True)
class _Run:
    """Records of one segment, in order, close enough for one call."""

    wanted: list[Wanted] = field(default_factory=list)
    vector: list[memoryview] = field(default_factory=list)
    frames: list[memoryview] = field(default_factory=list)
    """What stands before each record: a gap that ends with the frame."""
    nbytes: int = 0

    def add(self, wanted: Wanted, gap: int) -> None:
        frame = memoryview(bytearray(gap + FRAME_NBYTES))
        body = limit(wanted.buffers, wanted.entry.nbytes)
        self.wanted.append(wanted)
        self.frames.append(frame)
        self.vector += [frame, *body]
        self.nbytes += frame.nbytes + nbytes_of(body)

    def accepts(self, entry: Entry, num_buffers: int, most_nbytes: int) -> bool:
        last = self.wanted[-1].entry
        return (
            entry.segment == last.segment
            and self.wanted[0].entry.offset + self.nbytes == last.end  # no record is cut short
            and 0 <= entry.offset - last.end < MAX_GAP
            and self.nbytes + entry.nbytes <= most_nbytes
            and len(self.vector) + 1 + num_buffers <= IOV_MAX
        )


def read(files: SegmentFiles, wanted: Sequence[Wanted], threads: Threads) -> None:
    """Read the records, with the help of idle threads; returns when nobody writes to a buffer."""
    threads.share(lambda run: _read_run(files, run), _runs(wanted, threads.num_threads))


def _runs(wanted: Sequence[Wanted], num_threads: int) -> list[_Run]:
    ordered = sorted(wanted, key=lambda one: one.entry)
    total = sum(one.entry.nbytes for one in ordered)
    most_nbytes = max(_LEAST_SHARE, total // num_threads + 1)
    runs: list[_Run] = []
    for one in ordered:
        gap = 0
        if runs and runs[-1].accepts(one.entry, len(one.buffers), most_nbytes):
            gap = one.entry.offset - runs[-1].wanted[-1].entry.end
        else:
            runs.append(_Run())
        runs[-1].add(one, gap)
    return runs


def _read_run(files: SegmentFiles, run: _Run) -> None:
    segment, start = run.wanted[0].entry[:2]
    try:
        with files.using(segment) as fd:
            end = start + read_all(fd, run.vector, start)
    except FileNotFoundError:
        return
    for wanted, packed in zip(run.wanted, run.frames, strict=True):
        entry = wanted.entry
        frame = unpack(packed[-FRAME_NBYTES:], segment, entry.offset)
        wanted.is_intact = (
            frame is not None
            and frame.key == wanted.key
            and frame.nbytes == entry.nbytes
            and end >= entry.offset + FRAME_NBYTES + min(entry.nbytes, nbytes_of(wanted.buffers))
        )
