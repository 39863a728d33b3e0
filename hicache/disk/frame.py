"""The frame that stands before each record on disk, so that files describe themselves.

64 bytes: magic, key, record length, page number, stamp, spare, CRC-32 of all that and of the
frame's own place. A frame therefore cannot be mistaken for another one's copy, nor for bytes of
a payload that happen to look like one. The payload's checksum is PageStore's.
"""

import struct
from dataclasses import dataclass
from zlib import crc32

from hicache.keys import PageKey

MAGIC = b"HiCache\x01"
DEAD = b"hicache\x00"
"""In place of the magic: the record was deleted."""
_FRAME = struct.Struct("<8s32sQIIII")
_PLACE = struct.Struct("<QQ")
_CHECKED = _FRAME.size - 4
FRAME_NBYTES = _FRAME.size


@dataclass(frozen=True, slots=True)
class Frame:
    """What a frame says about its record."""

    key: PageKey
    nbytes: int
    """Of the record, without the frame."""
    number: int = 0
    """The page's number in its chain; 0 where it is not known."""
    stamp: int = 0
    """Minutes since 1970 when it was written."""

    def pack(self, segment: int = 0, offset: int = 0) -> bytes:
        """Return the frame's bytes for that place."""
        packed = _FRAME.pack(MAGIC, self.key, self.nbytes, self.number, self.stamp, 0, 0)
        crc = crc32(_PLACE.pack(segment, offset), crc32(packed[:_CHECKED]))
        return packed[:_CHECKED] + crc.to_bytes(4, "little")


def unpack(packed: memoryview | bytes, segment: int = 0, offset: int = 0) -> Frame | None:
    """Return the frame at that place; ``None`` where there is none, or a damaged one."""
    if len(packed) < FRAME_NBYTES:
        return None
    magic, key, nbytes, number, stamp, _, crc = _FRAME.unpack_from(packed)
    if magic != MAGIC or crc != crc32(_PLACE.pack(segment, offset), crc32(packed[:_CHECKED])):
        return None
    return Frame(PageKey(key), nbytes, number, stamp)


def is_frame_of(
    packed: memoryview | bytes, key: PageKey, nbytes: int, segment: int = 0, offset: int = 0
) -> bool:
    """Return whether it is the frame of that key's record, of that length, at that place.

    A hot path: makes no ``Frame``.
    """
    if len(packed) < FRAME_NBYTES:
        return False
    magic, found, length, _, _, _, crc = _FRAME.unpack_from(packed)
    return (
        (magic, found, length) == (MAGIC, key, nbytes)
        and crc == crc32(_PLACE.pack(segment, offset), crc32(packed[:_CHECKED]))
    )  # fmt: skip
