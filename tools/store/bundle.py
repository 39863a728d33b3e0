"""The file that ``export`` writes and ``import`` reads: records in frames, for any stream.

======= ====== =========================================================
offset  nbytes
======= ====== =========================================================
0       8      ``HiCaBndl``: the file
8       4      version of this format: 1
12      4      zero
16             frames, one behind the other; the last one is the end
======= ====== =========================================================

A frame is 64 bytes and then a record, or at the end nothing. Little-endian:

======= ====== =========================================================
offset  nbytes
======= ====== =========================================================
0       4      ``HiCf``: a frame
4       4      1 a record, 2 the end
8       8      length of the record; at the end, how many records there were
16      32     key of the record; at the end, zeros
48      8      xxh3-64 of the record
56      8      xxh3-64 of bytes 0 to 56
======= ====== =========================================================

The first record describes the namespace; pages follow, a parent always before its children, so
that the start of a file is of use when its end is lost. Records are as the store had them.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from hicache.errors import InputError
from hicache.keys import KEY_NBYTES, PageKey

VERSION = 1
_FILE = struct.Struct("<8sII")
_FILE_MAGIC = b"HiCaBndl"
_FRAME = struct.Struct("<4sIQ32sQ")
_SUM = struct.Struct("<Q")
_MAGIC = b"HiCf"
_RECORD, _END = 1, 2
_FRAME_NBYTES = _FRAME.size + _SUM.size
_MOST_NBYTES = 1 << 30
"""A frame that says more is damaged."""
_READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Framed:
    """A record out of a file; ``data`` is ``None`` where its frame's checksum does not hold."""

    key: PageKey
    data: bytes | None


@dataclass(slots=True)
class End:
    """How a file ended."""

    num_expected: int | None = None
    """Records that were written, as the end says; ``None`` where the end is missing."""
    num_skipped: int = 0
    """Stretches that are no frames."""


class Writer:
    """Writes a file."""

    def __init__(self, stream: BinaryIO) -> None:
        self.nbytes = 0
        self.num_records = 0
        self._stream = stream
        self._write(_FILE.pack(_FILE_MAGIC, VERSION, 0))

    def add(self, key: PageKey, data: bytes | memoryview) -> None:
        """Write a record."""
        digest = xxhash.xxh3_64_intdigest(data)
        self._write(_packed(_RECORD, len(data), key, digest))
        self._write(data)
        self.num_records += 1

    def end(self) -> None:
        """Write the end: without it a file counts as cut short."""
        self._write(_packed(_END, self.num_records, PageKey(bytes(KEY_NBYTES)), 0))
        self._stream.flush()

    def _write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self.nbytes += len(data)


class Source:
    """Reads a file from its start to its end, past what is damaged."""

    def __init__(self, stream: BinaryIO) -> None:
        """Raises ``InputError`` where it is no such file."""
        self.end = End()
        self.nbytes = 0
        self._stream = stream
        self._buffer = bytearray()
        self._is_over = False
        self._fill(_FILE.size)
        head = bytes(self._take(_FILE.size))
        magic, version, _ = _FILE.unpack(head) if len(head) == _FILE.size else (b"", 0, 0)
        if magic != _FILE_MAGIC:
            raise InputError("no file of `hicache store export`")
        if version != VERSION:
            raise InputError(f"a file of version {version}; this HiCache reads version {VERSION}")

    def __iter__(self) -> Iterator[Framed]:
        """Yield every record whose frame can be read; ``end`` is true afterwards."""
        is_lost = False
        while self._fill(_FRAME_NBYTES):
            frame = _unpacked(self._buffer)
            if frame is None:
                self.end.num_skipped += not is_lost
                is_lost = True
                self._seek()
                continue
            is_lost = False
            kind, length, key, digest = frame
            if kind == _END:
                self.end.num_expected = length
                return
            del self._buffer[:_FRAME_NBYTES]
            self.nbytes += _FRAME_NBYTES
            is_whole = self._fill(length)
            data = self._take(length) if is_whole else b""
            yield Framed(key, data if xxhash.xxh3_64_intdigest(data) == digest else None)

    def _seek(self) -> None:
        """Drop what is before the next start of a frame, if there is one in the buffer."""
        at = self._buffer.find(_MAGIC, 1)
        dropped = at if at > 0 else max(1, len(self._buffer) - len(_MAGIC) + 1)
        self._take(dropped)

    def _take(self, nbytes: int) -> bytes:
        data = bytes(memoryview(self._buffer)[:nbytes])
        del self._buffer[:nbytes]
        self.nbytes += len(data)
        return data

    def _fill(self, nbytes: int) -> bool:
        """Have so many bytes in the buffer; whether there were as many."""
        while len(self._buffer) < nbytes and not self._is_over:
            more = self._stream.read(max(_READ_NBYTES, nbytes - len(self._buffer)))
            self._buffer += more
            self._is_over = not more
        return len(self._buffer) >= nbytes


def _packed(kind: int, length: int, key: PageKey, digest: int) -> bytes:
    packed = _FRAME.pack(_MAGIC, kind, length, key, digest)
    return packed + _SUM.pack(xxhash.xxh3_64_intdigest(packed))


def _unpacked(buffer: bytearray) -> tuple[int, int, PageKey, int] | None:
    """Return kind, length, key and checksum of the frame that the buffer starts with."""
    packed = bytes(buffer[: _FRAME.size])
    magic, kind, length, key, digest = _FRAME.unpack(packed)
    (expected,) = _SUM.unpack_from(buffer, _FRAME.size)
    is_frame = magic == _MAGIC and xxhash.xxh3_64_intdigest(packed) == expected
    if not is_frame or kind not in (_RECORD, _END) or (kind == _RECORD and length > _MOST_NBYTES):
        return None
    return kind, length, PageKey(key), digest
