"""Fields framed by length, so that no two lists of fields have the same bytes.

``"a" + "bc"`` and ``"ab" + "c"`` are one string but two frames. Whatever is hashed as an
identity in HiCache is framed first.
"""

from collections.abc import Sequence

from hicache.errors import InputError

_LENGTH_NBYTES = 8


def frame(fields: Sequence[bytes]) -> bytes:
    """Return the fields, each behind its length (8 bytes, little-endian)."""
    return b"".join(
        part for field in fields for part in (len(field).to_bytes(_LENGTH_NBYTES, "little"), field)
    )


def unframe(data: bytes) -> list[bytes]:
    """Return the fields of a frame; raise ``InputError`` for bytes that are none."""
    fields: list[bytes] = []
    start = 0
    while start < len(data):
        end = start + _LENGTH_NBYTES
        length = int.from_bytes(data[start:end], "little")
        start = end + length
        if start > len(data):
            raise InputError("framed fields end early")
        fields.append(data[end:start])
    return fields
