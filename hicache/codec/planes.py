"""Pages made smaller without loss: planes of bytes, each compressed on its own where that helps.

Plane ``j`` of a page of items of ``k`` bytes is byte ``j`` of every item, in order. The last plane
has sign and exponent of little-endian floats, and these repeat; the others are noise, which is
kept as it is. One plane is plain zstd. A coded page, little-endian:

====== ====== ==============================================================
offset nbytes
====== ====== ==============================================================
0      8      xxh3-64 of the planes, one after the other, before compression
8      4 k    stored length of each plane; one of full length is stored as it is
8+4k          the planes, as stored
====== ====== ==============================================================

The sum proves what comes out: a decoder that errs, or frames that were never ours, do not reach
the page, which is only written once all its planes are there. Nothing grows beyond the page,
whatever a frame claims.
"""

import struct
import threading

import numpy as np
import xxhash
import zstandard

from hicache.errors import CorruptPage

_SUM = struct.Struct("<Q")
_MIN_GAIN = 32
"""A page that gains less than one part in so many is better read as it is."""
_MAX_WINDOW_NBYTES = 1 << 23
"""What a frame may ask of a decoder: all that levels up to 19 ask for."""


class Planes(threading.local):
    """Codes and decodes pages of ``page_nbytes`` bytes.

    Every thread has a compressor, a decompressor and room for one page of its own.
    """

    def __init__(self, page_nbytes: int, level: int = 1) -> None:
        self._page_nbytes = page_nbytes
        self._work = bytearray(page_nbytes)
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES)

    def encode(self, num_planes: int, page: memoryview, target: memoryview) -> int | None:
        """Write a page's coded form into ``target``; return its length, ``None`` where it is not
        worth it. ``target`` has room for a page.
        """
        _split(page, num_planes, self._work)
        end = _SUM.size + 4 * num_planes
        limit = self._page_nbytes - self._page_nbytes // _MIN_GAIN
        lengths: list[int] = []
        for plane in self._planes(num_planes):
            packed = self._compressor.compress(plane)
            stored = packed if len(packed) < len(plane) else plane
            if end + len(stored) > limit:
                return None
            target[end : end + len(stored)] = stored
            lengths.append(len(stored))
            end += len(stored)
        _SUM.pack_into(target, 0, xxhash.xxh3_64_intdigest(self._work))
        struct.pack_into(f"<{num_planes}I", target, _SUM.size, *lengths)
        return end

    def decode(self, num_planes: int, coded: memoryview, page: memoryview) -> None:
        """Write the page that ``coded`` was made of. Something may follow behind it.

        Raises ``CorruptPage`` where it is not the coded form of a page; ``page`` is untouched
        then.
        """
        at = _SUM.size + 4 * num_planes
        if len(coded) < at or self._page_nbytes % num_planes:
            raise CorruptPage(f"codec: {len(coded)} bytes are no {num_planes} planes")
        (summed,) = _SUM.unpack_from(coded)
        lengths = struct.unpack_from(f"<{num_planes}I", coded, _SUM.size)
        for plane, length in zip(self._planes(num_planes), lengths, strict=True):
            if length > min(len(coded) - at, len(plane)):
                raise CorruptPage(f"codec: a plane of {length} bytes")
            self._unpack(coded[at : at + length], plane)
            at += length
        if xxhash.xxh3_64_intdigest(self._work) != summed:
            raise CorruptPage("codec: what comes out has another checksum")
        _merge(self._work, num_planes, page)

    def _planes(self, num_planes: int) -> list[memoryview]:
        nbytes, work = self._page_nbytes // num_planes, memoryview(self._work)
        return [work[start : start + nbytes] for start in range(0, num_planes * nbytes, nbytes)]

    def _unpack(self, stored: memoryview, plane: memoryview) -> None:
        if len(stored) == len(plane):
            plane[:] = stored
            return
        try:
            with self._decompressor.stream_reader(stored) as reader:
                length, more = reader.readinto(plane), reader.read(1)
        except zstandard.ZstdError as error:
            raise CorruptPage(f"codec: {error}") from None
        if length != len(plane) or more:
            raise CorruptPage(f"codec: a plane that is not of {len(plane)} bytes")


def _split(page: memoryview, num_planes: int, work: bytearray) -> None:
    """Write the planes of a page, one after the other."""
    items = np.frombuffer(page, np.uint8).reshape(-1, num_planes)
    np.copyto(np.frombuffer(work, np.uint8).reshape(num_planes, -1), items.T)


def _merge(work: bytearray, num_planes: int, page: memoryview) -> None:
    """Write the page of these planes: whole items at a time, which is faster than byte by byte."""
    planes = np.frombuffer(work, np.uint8).reshape(num_planes, -1)
    items = np.frombuffer(page, f"<u{num_planes}")
    np.copyto(items, planes[-1])
    for plane in planes[-2::-1]:
        np.left_shift(items, 8, out=items)
        np.bitwise_or(items, plane, out=items)
