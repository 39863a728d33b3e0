"""The index: which segment holds which record, in LMDB.

It holds no payload, so it is small, and it can always be made again from the segments. LMDB
serialises writers of all processes; readers see one moment and never wait. Nothing is synced:
after ``kill -9`` the system still has every page, and after a power cut the index is checked
before it is opened (``recovery``), and each record's frame when it is read.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from hicache.disk.frame import FRAME_NBYTES
from hicache.errors import StorageUnavailable
from hicache.keys import KEY_NBYTES, PageKey

MAX_READERS = 512
LOCK_NBYTES = 128 * 1024
"""More than the lock file takes, of the budget."""
RECORD_NBYTES = 320
"""Index bytes to reckon with for a record: three times what it takes, for pages that are copied."""
_SNAPSHOT_BATCH, _GATHER_BATCH = 4096, 512
_ENTRY = struct.Struct("<QQIII")
_SEGMENT = struct.Struct("<QQI")
_ID = struct.Struct("<Q")
ENTRY_DTYPE = np.dtype(
    [("segment", "<u8"), ("offset", "<u8"), ("nbytes", "<u4"), ("number", "<u4"), ("stamp", "<u4")]
)
assert ENTRY_DTYPE.itemsize == _ENTRY.size


class IndexLost(StorageUnavailable):
    """The index can no longer be used; the store must be opened again."""


class Entry(NamedTuple):
    """Where a record is."""

    segment: int
    offset: int
    """Of its frame; the record follows."""
    nbytes: int
    """Of the record."""
    number: int
    """Page number in its chain."""
    stamp: int
    """Minutes since 1970 when it was last used."""

    @property
    def end(self) -> int:
        return self.offset + FRAME_NBYTES + self.nbytes


class Segment(NamedTuple):
    """What is known of a segment file."""

    capacity: int
    """Bytes that it may grow to; what it has, once nobody appends to it."""
    used: int
    """Bytes up to the end of its last record."""
    num_live: int
    """Records of it that the index names."""


class Keys:
    """Many keys in 32 bytes each; as objects they would take three times that."""

    def __init__(self, packed: bytearray) -> None:
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed) // KEY_NBYTES

    def __getitem__(self, position: int) -> PageKey:
        start = position * KEY_NBYTES
        return PageKey(bytes(self.packed[start : start + KEY_NBYTES]))


class Snapshot(NamedTuple):
    """Every record at one moment, in 60 bytes each."""

    keys: Keys
    entries: NDArray[np.void]
    """``ENTRY_DTYPE``, ``[len(keys)]``."""


class View:
    """The index at one moment."""

    def __init__(
        self,
        txn: "lmdb.Transaction[bytes]",
        records: "lmdb._Database",
        segments: "lmdb._Database",
    ) -> None:
        self._txn = txn
        self._records = records
        self._segments = segments

    def entry(self, key: bytes) -> Entry | None:
        packed = self._txn.get(key, db=self._records)
        return None if packed is None else Entry._make(_unpack(_ENTRY, packed))

    def segment(self, number: int) -> Segment | None:
        packed = self._txn.get(_ID.pack(number), db=self._segments)
        return None if packed is None else Segment._make(_unpack(_SEGMENT, packed))

    def segments(self) -> dict[int, Segment]:
        """Return every segment. O(segments), some hundreds."""
        return {
            _unpack(_ID, name)[0]: Segment._make(_unpack(_SEGMENT, packed))
            for name, packed in self._txn.cursor(self._segments)
        }

    @property
    def num_records(self) -> int:
        return self._txn.stat(self._records)["entries"]


class Change(View):
    """A write transaction: all of it or nothing."""

    def put(self, key: bytes, entry: Entry) -> None:
        self._txn.put(key, _ENTRY.pack(*entry), db=self._records)

    def remove(self, key: bytes) -> None:
        self._txn.delete(key, db=self._records)

    def put_segment(self, number: int, segment: Segment) -> None:
        self._txn.put(_ID.pack(number), _SEGMENT.pack(*segment), db=self._segments)

    def remove_segment(self, number: int) -> None:
        self._txn.delete(_ID.pack(number), db=self._segments)


class Index:
    """An open index. Any thread may call anything; LMDB lets one write at a time."""

    def __init__(self, path: Path, map_nbytes: int) -> None:
        """Open or make it. ``map_nbytes`` 0 takes the size that it was made with."""
        self._env = lmdb.open(
            str(path),
            subdir=False,
            map_size=map_nbytes,
            max_dbs=2,
            max_readers=MAX_READERS,
            mode=0o600,
            sync=False,
            metasync=False,
            readahead=False,
        )
        try:
            self._env.reader_check()
            self._records = self._env.open_db(b"records")
            self._segments = self._env.open_db(b"segments")
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._env.close()
            raise
        self.max_records = int(self._env.info()["map_size"]) // RECORD_NBYTES
        """How many records fit for certain."""
        self._least_nbytes = 0
        self.num_lost = 0
        """Records that it named, and that were gone from disk when it was opened."""

    def look_up(self, keys: Sequence[PageKey]) -> list[Entry | None]:
        """Return where each record is, at one moment; ``None`` where absent."""
        self._check()
        with self._env.begin(db=self._records) as txn:
            found = [txn.get(key) for key in keys]
        make, unpack = Entry._make, _ENTRY.unpack  # a hot path
        try:
            return [None if packed is None else make(unpack(packed)) for packed in found]
        except struct.error:
            raise IndexLost("the index is damaged: a value of another length") from None

    def snapshot(self) -> Snapshot:
        """Return every record, at one moment. O(records), 0.3 us each."""
        self._check()
        with self._env.begin(db=self._records) as txn:
            return _packed(iter(txn.cursor()))

    def gather(self) -> Snapshot:
        """Return every record, at several moments: no transaction sees many.

        While one reads, LMDB can use no page again, and a small map is soon full.
        """
        parts: list[Snapshot] = []
        after = b""
        while not parts or len(parts[-1].keys) == _GATHER_BATCH:
            self._check()
            with self._env.begin(db=self._records) as txn:
                cursor = txn.cursor()
                is_there = cursor.set_range(after) if after else cursor.first()
                rest = cursor.iternext() if is_there else iter(())
                parts.append(_packed(islice(rest, _GATHER_BATCH)))
            if len(parts[-1].keys):
                after = parts[-1].keys[len(parts[-1].keys) - 1] + b"\0"
        keys = Keys(bytearray().join([part.keys.packed for part in parts]))
        return Snapshot(keys, np.concatenate([part.entries for part in parts]))

    @contextmanager
    def view(self) -> Iterator[View]:
        """Give the index as it is now; keep it for a moment only, since it keeps old pages."""
        self._check()
        with self._env.begin() as txn:
            yield View(txn, self._records, self._segments)

    @contextmanager
    def change(self) -> Iterator[Change]:
        """Give a write transaction; it is committed at the end, or undone by an exception."""
        self._check()
        with self._env.begin(write=True) as txn:
            yield Change(txn, self._records, self._segments)

    def sync(self) -> None:
        """Have it on the disk as it is now. O(what has changed)."""
        self._check()
        self._env.sync(True)

    def is_at(self, path: Path) -> bool:
        """Return whether ``path`` still is this index's file."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go, with what is in memory on its way to the disk. No thread may be reading."""
        os.close(self._fd)
        self._env.close()

    def _check(self) -> None:
        """Refuse to touch a mapped file that has been cut short: that would be SIGBUS."""
        least = self._least_nbytes  # before the size: another thread may see it grow in between
        nbytes = os.fstat(self._fd).st_size
        if nbytes < least:
            raise IndexLost("the index was cut short by somebody else")
        self._least_nbytes = nbytes


def _packed(cursor: Iterator[tuple[bytes, bytes]]) -> Snapshot:
    """Return the records that a cursor comes by."""
    keys, entries = bytearray(), bytearray()
    while items := list(islice(cursor, _SNAPSHOT_BATCH)):
        keys += b"".join([key for key, _ in items])
        entries += b"".join([value for _, value in items])
        if any(len(key) != KEY_NBYTES or len(value) != _ENTRY.size for key, value in items):
            raise IndexLost("the index is damaged: a record of another length")
    found = np.frombuffer(entries, ENTRY_DTYPE) if entries else np.zeros(0, ENTRY_DTYPE)
    return Snapshot(Keys(keys), found)


def _unpack(form: struct.Struct, packed: bytes) -> tuple[int, ...]:
    if len(packed) != form.size:
        raise IndexLost("the index is damaged: a value of another length")
    return form.unpack(packed)


def entries_of(snapshot: Snapshot, positions: NDArray[np.intp]) -> list[tuple[PageKey, Entry]]:
    """Return the records at these positions of a snapshot."""
    rows = snapshot.entries[positions].tolist()
    return [
        (snapshot.keys[position], Entry._make(row))
        for position, row in zip(positions.tolist(), rows, strict=True)
    ]
