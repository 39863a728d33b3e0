"""Segment files: append-only, self-describing, read by offset.

A segment is named by 64 random bits and never reused, so an old descriptor can at worst read
what was there. The process that appends to one holds a ``flock`` on it, which ends with the
process however that ends.
"""

import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache.disk.frame import FRAME_NBYTES, MAGIC, Frame, unpack

SUFFIX = ".seg"
_MAX_OPEN = 128
_SMALL_READ = 8 * 1024
_LARGE_READ = 1024 * 1024


class _Open:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.num_users = 0
        self.is_dropped = False


class SegmentFiles:
    """The segment files of a store, with a bounded number of descriptors. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def path(self, segment: int) -> Path:
        return self.folder / f"{segment:016x}{SUFFIX}"

    def found(self) -> dict[int, int]:
        """Return the size of each segment file there is."""
        sizes: dict[int, int] = {}
        with os.scandir(self.folder) as files:
            for file in files:
                stem, suffix = os.path.splitext(file.name)
                if suffix == SUFFIX and len(stem) == 16 and file.is_file(follow_symlinks=False):
                    sizes[int(stem, 16)] = file.stat().st_size
        return sizes

    @contextmanager
    def using(self, segment: int) -> Iterator[int]:
        """Give a descriptor that stays open meanwhile; ``FileNotFoundError`` if it is gone."""
        opened = self._take(segment)
        try:
            yield opened.fd
        finally:
            with self._lock:
                opened.num_users -= 1
                if opened.is_dropped and opened.num_users == 0:
                    os.close(opened.fd)

    def nbytes(self, segment: int) -> int:
        """Return the size of the file; 0 if it is gone."""
        try:
            with self.using(segment) as fd:
                status = os.fstat(fd)
        except FileNotFoundError:
            return 0
        return status.st_size if status.st_nlink else 0

    def drop(self, segment: int) -> None:
        """Close its descriptor once nobody uses it."""
        with self._lock:
            opened = self._open.pop(segment, None)
            if opened is not None:
                self._retire(opened)

    def drop_unlinked(self) -> None:
        """Close descriptors of files that somebody has removed: they keep the disk full."""
        with self._lock:
            for segment, opened in list(self._open.items()):
                if os.fstat(opened.fd).st_nlink == 0:
                    del self._open[segment]
                    self._retire(opened)

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._retire(self._open.popitem()[1])

    def _take(self, segment: int) -> _Open:
        with self._lock:
            opened = self._open.get(segment)
            if opened is None:
                opened = _Open(os.open(self.path(segment), os.O_RDWR | os.O_CLOEXEC))
                self._open[segment] = opened
                if len(self._open) > _MAX_OPEN:
                    self._retire(self._open.popitem(last=False)[1])
            self._open.move_to_end(segment)
            opened.num_users += 1
            return opened

    @staticmethod
    def _retire(opened: _Open) -> None:
        opened.is_dropped = True
        if opened.num_users == 0:
            os.close(opened.fd)


def create(files: SegmentFiles) -> tuple[int, int]:
    """Make an empty segment; return its number and a descriptor that holds its lock."""
    segment = int.from_bytes(os.urandom(8), "little")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(files.path(segment), flags, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return segment, fd


def is_in_use(files: SegmentFiles, segment: int) -> bool:
    """Return whether some process appends to it."""
    try:
        fd = os.open(files.path(segment), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def frames(fd: int, segment: int, start: int, end: int) -> Iterator[tuple[int, Frame]]:
    """Yield each whole record's frame between two offsets, with its own offset.

    Between records there may be a gap, and damage: the search goes on behind it.
    """
    position = start
    span = _SMALL_READ
    while position + FRAME_NBYTES <= end:
        chunk = os.pread(fd, min(span, end - position), position)
        if not chunk:
            return
        found = chunk.find(MAGIC)
        if found < 0 or len(chunk) - found < FRAME_NBYTES:
            step = found if found > 0 else len(chunk) - len(MAGIC) + 1
            position, span = position + max(step, 1), _LARGE_READ
            continue
        position += found
        frame = unpack(chunk[found : found + FRAME_NBYTES], segment, position)
        if frame is None or position + FRAME_NBYTES + frame.nbytes > end:
            position, span = position + 1, _LARGE_READ
            continue
        yield position, frame
        position, span = position + FRAME_NBYTES + frame.nbytes, _SMALL_READ
