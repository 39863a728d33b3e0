"""What the first process to open a store does: makes index and segments agree.

It is alone then (it holds the store's lock), so whatever it finds is from the past. An index
that is damaged is thrown away and made again from the segments' frames. LMDB maps its file and
trusts it, so the file is checked page by page, without mapping it, before LMDB sees it.
"""

import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
from lmdb import verify

from hicache.backends.lmdb.index import Change, Entry, Index, IndexLost, Segment, Snapshot
from hicache.backends.lmdb.segments import SegmentFiles, frames
from hicache.disk.directory import TEMPORARY_SUFFIX
from hicache.keys import PageKey

logger = logging.getLogger(__name__)

_BATCH = 4096
_verify: Callable[..., list[str]] = verify.verify
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    IndexLost,
)
_UNREADABLE = (verify.VerifyError, struct.error, ValueError, IndexError, OverflowError)


def sweep(folder: Path) -> None:
    """Remove temporary files that a crash has left."""
    for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def discard_damaged(path: Path, most_nbytes: int) -> None:
    """Remove an index that LMDB should not be given: damaged, cut short, or far too large.

    O(index), 13 ms a megabyte.
    """
    if not path.exists():
        return
    nbytes = path.stat().st_size
    try:
        problems: list[str] = _verify(str(path), subdir=False) if nbytes <= most_nbytes else []
    except _UNREADABLE as error:
        problems = [str(error)]
    if problems:
        logger.warning("%s: damaged (%s): making it again", path, problems[0])
    if problems or nbytes > most_nbytes:
        discard(path)


def discard(path: Path) -> None:
    """Remove the index and its lock file."""
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}-lock").unlink(missing_ok=True)


def open_reconciled(path: Path, map_nbytes: int, files: SegmentFiles) -> Index:
    """Return the index, in agreement with the segments; made again where it cannot be read."""
    try:
        return _opened(path, map_nbytes, files)
    except _DAMAGED as error:
        logger.warning("%s: damaged (%s): making it again", path, error)
    discard(path)
    return _opened(path, map_nbytes, files)


def _opened(path: Path, map_nbytes: int, files: SegmentFiles) -> Index:
    index = Index(path, map_nbytes)
    try:
        _reconcile(files, index)
    except BaseException:
        index.close()
        raise
    return index


def _reconcile(files: SegmentFiles, index: Index) -> None:
    """Make the index name exactly the records that are whole in segment files.

    Records that were written but not named are named; names without a record go; torn tails are
    cut off; segments without a record are removed. O(index), and O(records) of what it does not
    know.
    """
    sizes = files.found()
    with index.view() as view:
        known = view.segments()
    index.num_lost = _drop_lost(index, sizes)
    for segment, nbytes in sorted(sizes.items(), key=lambda one: _age(files, one[0])):
        start = min(known[segment].used, nbytes) if segment in known else 0
        if start < nbytes:
            sizes[segment] = _name_new(files, index, segment, start, nbytes)
    _count(files, index, sizes)


def _drop_lost(index: Index, sizes: dict[int, int]) -> int:
    """Remove entries that point behind the end of a file, or to none; return how many."""
    snapshot = index.snapshot()
    ends = snapshot.entries["offset"] + snapshot.entries["nbytes"]
    have = np.zeros(len(snapshot.keys), np.uint64)
    names, inverse = np.unique(snapshot.entries["segment"], return_inverse=True)
    if len(names):
        have = np.array([sizes.get(int(name), 0) for name in names], np.uint64)[inverse]
    lost = np.flatnonzero(ends >= have).tolist()
    if lost:
        logger.warning("%d records are gone from disk", len(lost))
    for start in range(0, len(lost), _BATCH):
        with index.change() as change:
            for position in lost[start : start + _BATCH]:
                change.remove(snapshot.keys[position])
    return len(lost)


def _name_new(files: SegmentFiles, index: Index, segment: int, start: int, nbytes: int) -> int:
    """Enter the records behind ``start``; cut the file where the last one ends; return that."""
    end = start
    with files.using(segment) as fd:
        found = _entries(fd, segment, start, nbytes)
        while batch := [entry for _, entry in zip(range(_BATCH), found, strict=False)]:
            with index.change() as change:
                for key, entry in batch:
                    change.put(key, entry)
            end = batch[-1][1].end
        os.ftruncate(fd, end)
    return end


def _entries(fd: int, segment: int, start: int, end: int) -> Iterator[tuple[PageKey, Entry]]:
    for offset, frame in frames(fd, segment, start, end):
        yield frame.key, Entry(segment, offset, frame.nbytes, frame.number, frame.stamp)


def _age(files: SegmentFiles, segment: int) -> float:
    return files.path(segment).stat().st_mtime


def _count(files: SegmentFiles, index: Index, sizes: dict[int, int]) -> None:
    """Write down every segment's size and records; remove those that have none."""
    counts = _counts(index.snapshot())
    with index.change() as change:
        for segment in change.segments():
            if segment not in sizes:
                change.remove_segment(segment)
        for segment, nbytes in sizes.items():
            if counts.get(segment) or not _remove(files, change, segment):
                change.put_segment(segment, Segment(nbytes, nbytes, counts.get(segment, 0)))


def _counts(snapshot: Snapshot) -> dict[int, int]:
    names, counts = np.unique(snapshot.entries["segment"], return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))


def _remove(files: SegmentFiles, change: Change, segment: int) -> bool:
    files.drop(segment)
    try:
        files.path(segment).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: cannot be deleted: %s", files.path(segment), error.strerror)
        return False
    change.remove_segment(segment)
    return True
