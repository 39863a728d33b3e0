"""Record files: where they are, how they are written, read and recognised.

``objects/ab/cd/<key in hex>`` is a frame and the record. It appears by ``rename``, so it is whole
or absent. Its modification time is its use stamp: the minute, and within the minute the page
number turned round, so that the oldest time is the deepest page.
"""

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from typing_extensions import Buffer

from hicache.disk.directory import TEMPORARY_SUFFIX
from hicache.disk.frame import FRAME_NBYTES, Frame, is_frame_of
from hicache.disk.syncing import sync_folders
from hicache.disk.vector import limit, nbytes_of, read_all, write_all
from hicache.keys import KEY_NBYTES, PageKey

MINUTE_NS = 60 * 10**9
_DEEPEST = 59_999_999
_ABANDONED_S = 3600.0
_MOST_TRIES = 4
"""Somebody may remove a directory while we make it."""


def stamp_ns(minute: int, number: int) -> int:
    """Return the modification time of a page used in that minute."""
    return minute * MINUTE_NS + (_DEEPEST - min(number, _DEEPEST)) * 1000


def key_of(name: str) -> PageKey | None:
    """Return the key that a file name says; ``None`` for a foreign file."""
    if len(name) != 2 * KEY_NBYTES or name != name.lower():
        return None
    try:
        return PageKey(bytes.fromhex(name))
    except ValueError:
        return None


class RecordFiles:
    """The record files under one directory, and the temporary ones of this process."""

    def __init__(self, path: Path) -> None:
        self.objects = path / "objects"
        self.temporary = path / "tmp"
        self._root = str(self.objects)
        self._me = f"{socket.gethostname()}~{os.getpid()}~{os.urandom(4).hex()}"
        self._lock = threading.Lock()
        self._num_made = 0

    def path(self, key: PageKey) -> str:
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name[2:4]}/{name}"

    def nbytes(self, key: PageKey) -> int | None:
        """Return how long the record is, by its file's size; ``None`` where there is none."""
        try:
            return os.stat(self.path(key)).st_size - FRAME_NBYTES
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(
        self,
        key: PageKey,
        buffers: Sequence[Buffer],
        minute: int,
        number: int,
        is_synced: bool = False,
    ) -> None:
        """Make the record's file, in place of what is there. Leaves nothing behind if it fails.

        ``is_synced`` puts its bytes on the disk before they have their name.
        """
        frame = Frame(key, nbytes_of(buffers), number, minute).pack()
        temporary = self.reserve(f"{key.hex()[:8]}{TEMPORARY_SUFFIX}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, [frame, *buffers], 0)
                time_ns = stamp_ns(minute, number)
                os.utime(fd, ns=(time_ns, time_ns))
                if is_synced:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
            self._publish(temporary, self.path(key))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def sync_bytes(self, key: PageKey) -> None:
        """Have a record's bytes on the disk; one that is gone has none."""
        with suppress(FileNotFoundError, NotADirectoryError):
            fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)

    def sync_names(self, keys: Iterable[PageKey]) -> None:
        """Have the names of these records on the disk, from theirs up to the topmost directory."""
        parents = {os.path.dirname(self.path(key)) for key in keys}
        sync_folders([*parents, *{os.path.dirname(parent) for parent in parents}, self._root])

    def reserve(self, purpose: str) -> Path:
        """Return a path for a temporary file that nobody else uses."""
        with self._lock:
            self._num_made += 1
            return self.temporary / f"{self._me}~{self._num_made}~{purpose}"

    def read(self, key: PageKey, buffers: Sequence[memoryview]) -> int | None:
        """Read a record into the buffers; return its length, ``None`` where it is absent.

        A file that is not that record, whole, raises ``Damaged``.
        """
        try:
            fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            status = os.fstat(fd)
            nbytes = status.st_size - FRAME_NBYTES
            packed = memoryview(bytearray(FRAME_NBYTES))
            body = limit(buffers, nbytes)
            count = read_all(fd, [packed, *body], 0)
        finally:
            os.close(fd)
        if count < FRAME_NBYTES + nbytes_of(body) or not is_frame_of(packed, key, nbytes):
            raise Damaged(status)
        return nbytes

    def remove(self, key: PageKey, only: os.stat_result | None = None) -> int | None:
        """Delete a record's file, if it is ``only``; return its size, ``None`` if it was absent."""
        path = self.path(key)
        try:
            status = os.stat(path)
            if only is not None and not os.path.samestat(status, only):
                return None
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with suppress(OSError):
            os.rmdir(os.path.dirname(path))  # else a small store would be mostly directories
        return status.st_size

    def touch(self, key: PageKey, minute: int) -> None:
        """Move the use stamp to that minute. No write where it is there already."""
        path = self.path(key)
        try:
            before_ns = os.stat(path).st_mtime_ns
            if before_ns // MINUTE_NS != minute:
                time_ns = minute * MINUTE_NS + before_ns % MINUTE_NS
                os.utime(path, ns=(time_ns, time_ns))
        except (FileNotFoundError, NotADirectoryError):
            return

    def shards(self) -> list[str]:
        """Return the directories that hold record files."""
        return [
            second for first in _directories(self._root) for second in sorted(_directories(first))
        ]

    def inside(self, shard: str) -> Iterator[tuple[PageKey, os.stat_result]]:
        """Yield the record files of a shard; foreign files are passed over."""
        try:
            with os.scandir(shard) as files:
                for file in files:
                    key = key_of(file.name)
                    if key is not None and file.is_file(follow_symlinks=False):
                        try:
                            yield key, file.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
        except FileNotFoundError:
            return

    def sweep(self) -> int:
        """Remove temporary files of processes that are gone; return how many there were."""
        num_swept = 0
        with os.scandir(self.temporary) as files:
            for file in files:
                with suppress(FileNotFoundError):  # that somebody has renamed it meanwhile
                    if _is_abandoned(file):
                        os.unlink(file.path)
                        num_swept += 1
        return num_swept

    def claims(self, suffix: str) -> Iterator[str]:
        """Yield the names of all temporary files with that suffix."""
        with os.scandir(self.temporary) as files:
            yield from (file.name for file in files if file.name.endswith(suffix))

    def _publish(self, temporary: Path, path: str) -> None:
        for _ in range(_MOST_TRIES):
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                parent = os.path.dirname(path)
                os.makedirs(os.path.dirname(parent), 0o700, exist_ok=True)
                with suppress(FileExistsError):
                    os.mkdir(parent, 0o700)
            else:
                return
        os.rename(temporary, path)


class Damaged(Exception):
    """A file is not the record that its name says."""

    def __init__(self, status: os.stat_result) -> None:
        super().__init__("damaged")
        self.status = status


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as files:
            return [one.path for one in files if len(one.name) == 2 and one.is_dir()]
    except FileNotFoundError:
        return []


def _is_abandoned(file: "os.DirEntry[str]") -> bool:
    """Return whether whoever made a temporary file is gone: no such process, or long ago."""
    host, _, rest = file.name.partition("~")
    pid = rest.partition("~")[0]
    if host == socket.gethostname() and pid.isdigit():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it lives, and is another user's
    return time.time() - file.stat().st_mtime > _ABANDONED_S
