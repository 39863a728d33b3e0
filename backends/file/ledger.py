"""One byte budget for a directory, whoever writes to it.

The file ``usage`` counts bytes and records for all processes, behind a lock on the file itself.
A writer claims bytes before it writes and settles afterwards, so the count is never too low; what
makes it too high (a crash, files deleted by hand) is found by counting anew before anything is
evicted.
"""

import fcntl
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

logger = logging.getLogger(__name__)

_TOTALS = struct.Struct("<8sQQ")
_MAGIC = b"HiCuse\x00\x01"


@dataclass(slots=True)
class Totals:
    """What a directory holds, claims included."""

    nbytes: int
    num_records: int

    def add(self, nbytes: int, num_records: int) -> None:
        self.nbytes = max(self.nbytes + nbytes, 0)
        self.num_records = max(self.num_records + num_records, 0)


class Ledger:
    """The count of one directory. Thread-safe, and safe between processes."""

    def __init__(self, path: Path, count: Callable[[], Totals]) -> None:
        """``count`` counts what is there, for when the file says nothing."""
        self._path = path
        self._count = count
        self._threads = threading.Lock()
        self._fd: int | None = None
        self.open()

    def open(self) -> None:
        """Open the file, or the one that is in its place now; make it where there is none."""
        with self._threads:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self.held():
            pass

    @contextmanager
    def held(self) -> Iterator[Totals]:
        """Give the totals to change; nobody else changes them meanwhile."""
        with self._threads:
            fd = self._fd
            assert fd is not None
            is_locked = self._lock(fd)
            try:
                totals = _read(fd) or self._count()
                try:
                    yield totals
                finally:
                    packed = _TOTALS.pack(_MAGIC, totals.nbytes, totals.num_records)
                    os.pwrite(fd, packed + crc32(packed).to_bytes(4, "little"), 0)
            finally:
                if is_locked:
                    fcntl.flock(fd, fcntl.LOCK_UN)

    def totals(self) -> Totals:
        """Return what was counted last."""
        with self._threads:
            assert self._fd is not None
            return _read(self._fd) or self._count()

    @property
    def is_in_place(self) -> bool:
        """Whether the file still is where it was opened."""
        try:
            return self._fd is not None and os.path.samestat(
                os.stat(self._path), os.fstat(self._fd)
            )
        except OSError:
            return False

    def close(self) -> None:
        with self._threads:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            logger.debug("%s: no locks on this file system: %s", self._path, error)
            return False
        return True


def _read(fd: int) -> Totals | None:
    packed = os.pread(fd, _TOTALS.size + 4, 0)
    if packed[_TOTALS.size :] != crc32(packed[: _TOTALS.size]).to_bytes(4, "little"):
        return None
    magic, nbytes, num_records = _TOTALS.unpack_from(packed)
    return Totals(nbytes, num_records) if magic == _MAGIC else None
