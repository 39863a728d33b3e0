"""The directory of a store: made, claimed by one kind of store, refused in one clear line."""

import errno
import logging
import os
import shutil
from pathlib import Path

from hicache.errors import StorageError, StorageFull, StorageOutdated, StorageUnavailable

logger = logging.getLogger(__name__)

FORMAT_FILE = "hicache-store"
TEMPORARY_SUFFIX = ".tmp"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
_MOST_NBYTES = 64 * 10**9


def storage_error(error: OSError, path: Path | None = None) -> StorageError:
    """Return the ``StorageError`` that says what the system said, in one line."""
    where = path or error.filename or "store"
    text = f"{where}: {error.strerror or error}"
    if error.errno in _FULL:
        return StorageFull(text)
    return StorageUnavailable(text)


def prepare(path: Path) -> None:
    """Make the directory, for its owner only; raise ``StorageError`` where that cannot be."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except FileExistsError:
        raise StorageError(f"{path}: is not a directory") from None
    except OSError as error:
        raise storage_error(error, path) from None


def is_claimed(path: Path, kind: str, version: int) -> bool:
    """Return whether the directory holds a store of that kind and version."""
    return _read(path / FORMAT_FILE) == _line(kind, version)


def is_store(path: Path, kind: str, version: int) -> bool:
    """Return whether the directory holds a store of that kind and version. Changes nothing.

    Raises ``StorageError`` where it holds another store, which opening would refuse or empty.
    """
    try:
        found = _read(path / FORMAT_FILE)
    except OSError as error:
        raise storage_error(error, path) from None
    if found is None or found == _line(kind, version):
        return found is not None
    if (other := kind_at(path)) not in (None, kind):
        raise StorageError(f"{path}: holds a store of kind {other}, not {kind}")
    raise StorageOutdated(f"{path}: a store of another format ({found.strip()[:40]!r})")


def kind_at(path: Path) -> str | None:
    """Return of which kind the store in a directory is; ``None`` where there is none to read."""
    try:
        words = (_read(path / FORMAT_FILE) or "").split()
    except OSError:
        return None
    return words[1] if len(words) == 3 and words[0] == "hicache" else None


def claim(path: Path, kind: str, version: int) -> bool:
    """Write down what kind of store it is; return whether what it held can be used.

    Raises ``StorageError`` where it cannot be written, or is a store of another kind.
    """
    expected = _line(kind, version)
    try:
        found = _read(path / FORMAT_FILE)
        words = (found or expected).split()
        if len(words) == 3 and words[0] == "hicache" and words[1] != kind:
            raise StorageError(f"{path}: holds a store of kind {words[1]}, not {kind}")
        if found != expected:
            _publish(path / FORMAT_FILE, expected)
        for left in path.glob(f"{FORMAT_FILE}.*{TEMPORARY_SUFFIX}"):
            left.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, path) from None
    if found is None or found == expected:
        return True
    logger.warning("%s: a store of another format (%.40r): starting empty", path, found.strip())
    return False


def _line(kind: str, version: int) -> str:
    return f"hicache {kind} {version}\n"


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _publish(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w") as file:
        file.write(text)
    try:
        os.rename(temporary, path)
    except FileNotFoundError:
        if _read(path) != text:  # else who was faster has taken ours for one that a crash left
            raise


def default_budget(path: Path) -> int:
    """Return half of what is free where the store will be, 64 GB at most."""
    while not path.exists():
        path = path.parent
    return min(shutil.disk_usage(path).free // 2, _MOST_NBYTES)
