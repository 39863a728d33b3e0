"""The record: what stands before a page's bytes in storage, so that they prove what they are.

A record is a header and a payload. Every header of one page size has the same length, so that
``get`` can scatter a record into a header buffer and the page itself, or scratch. Little-endian:

====== ====== ==============================================================
offset nbytes
====== ====== ==============================================================
0      4      magic, ``HiCa``
4      2      format version
6      1      kind: 0 a page, 1 the description of a namespace, 2 a sealed page
7      1      codec of the payload: 0 none, 1, 2 or 4 zstd of so many planes of bytes
8      8      checksum: xxh3-64 of bytes 16 to the end of the header, then of the payload as stored
16     8      created, microseconds since 1970
24     8      stored length: bytes of the payload as it is stored
32     8      raw length: bytes of the payload as it was
40     4      header length
44     4      number of the page in its chain
48     4      number of tokens, T
52     4      zero
56     32     namespace digest
88     32     page key
120    32     parent key: of the page before, or the namespace digest
152    4 T    token ids, int32
152+4T        zero, to a multiple of 64 (or of the alignment that the backend asks for)
====== ====== ==============================================================

A sealed page has names of keys (``sealing``) where a page has its key and its parent's, but for
the parent of a first page, which is the namespace digest in both. From byte 152 on it has:

====== ====== ==============================================================
152    8      id of the master key
160    12     nonce
172    4      zero
176    16     tag of what is sealed in the header
192    32     sealed: parent key
224    4 T    sealed: token ids, int32
224+4T        zero, as above
====== ====== ==============================================================

The first eight bytes are outside the checksum, because each value of them that we accept is known;
its seed is the codec, plus 256 where the page is sealed, so that these are no exception.
The checksum is of what is stored, so that damage is found before anything is decoded, by those
who have no key too. The description of a namespace has no tokens, its digest as key, zeros as
parent, and is proved by hashing: SHA-256 of the payload is the key.

This module knows bytes. It reads no clock and no file, and never copies a payload.
"""

import struct
from dataclasses import dataclass
from hashlib import sha256

import xxhash
from typing_extensions import Buffer

from hicache.errors import CorruptPage
from hicache.keys import KEY_NBYTES, TOKEN_NBYTES, NamespaceDigest, PageKey

MAGIC = b"HiCa"
FORMAT_VERSION = 1
KIND_PAGE, KIND_NAMESPACE, KIND_SEALED = 0, 1, 2
CODEC_NONE = 0
ZSTD_CODECS = (1, 2, 4)
"""Each is the number of planes."""

_FIXED = struct.Struct("<4sHBBQQQQIIII32s32s32s")
CHECKSUM = struct.Struct("<Q")
_KIND_AT, _CODEC_AT, CHECKSUM_START, SUMMED_START, _LENGTH_AT = 6, 7, 8, 16, 40
_NO_KEY = bytes(KEY_NBYTES)
_MIN_ALIGNMENT = 64

FIXED_NBYTES = _FIXED.size
"""Bytes of a header before its tokens."""
SEALED_FIXED_NBYTES = FIXED_NBYTES + 72
"""The same, of a sealed page."""


def header_nbytes(page_size: int, alignment: int = 1, fixed_nbytes: int = FIXED_NBYTES) -> int:
    """Return the length of the header of every page of ``page_size`` tokens."""
    unit = max(alignment, _MIN_ALIGNMENT)
    return -(-(fixed_nbytes + TOKEN_NBYTES * page_size) // unit) * unit


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says, believed by nobody before it is verified."""

    version: int
    kind: int
    codec: int
    checksum: int
    created_us: int
    stored_nbytes: int
    raw_nbytes: int
    header_nbytes: int
    number: int
    num_tokens: int
    namespace: NamespaceDigest
    key: PageKey
    """Under which the record is stored: of a sealed page, the name of its key."""
    parent: bytes
    tokens: bytes
    """Of a sealed page none: they are sealed."""

    @property
    def is_page(self) -> bool:
        """Whether it stands before a page, sealed or not."""
        return self.kind in (KIND_PAGE, KIND_SEALED)


def parse(header: Buffer) -> Header:
    """Return what the start of a record says. Raises ``CorruptPage`` where it is no header of ours.

    A header of another format version is refused, as its fields may lie elsewhere.
    """
    raw = bytes(header)
    found = peek(raw)
    if found.header_nbytes > len(raw):
        raise CorruptPage(f"length: a header of {found.header_nbytes} bytes, {len(raw)} of them")
    return found


def peek(head: Buffer) -> Header:
    """Return what the first ``FIXED_NBYTES`` or more of a record say, with the tokens among them.

    For those who only look. Raises ``CorruptPage`` where it is no header of ours.
    """
    raw = bytes(head)
    if len(raw) < FIXED_NBYTES:
        raise CorruptPage(f"length: a header of {len(raw)} bytes")
    (
        magic, version, kind, codec, checksum, created_us, stored_nbytes, raw_nbytes,
        nbytes, number, num_tokens, _, namespace, key, parent,
    ) = _FIXED.unpack_from(raw)  # fmt: skip
    if magic != MAGIC:
        raise CorruptPage(f"magic: {magic!r}")
    if version != FORMAT_VERSION:
        raise CorruptPage(f"version: {version}, not {FORMAT_VERSION}")
    start = SEALED_FIXED_NBYTES if kind == KIND_SEALED else FIXED_NBYTES
    end = start + TOKEN_NBYTES * num_tokens
    if nbytes < end:
        raise CorruptPage(f"length: {num_tokens} tokens in a header of {nbytes} bytes")
    return Header(
        version, kind, codec, checksum, created_us, stored_nbytes, raw_nbytes, nbytes, number,
        num_tokens, NamespaceDigest(namespace), PageKey(key), parent,
        b"" if kind == KIND_SEALED else raw[start:end],
    )  # fmt: skip


def prove(key: PageKey, record: memoryview) -> Header:
    """Return the header of a whole record that is what it says, and belongs under its key.

    For those who look at a store and expect nothing: a page's tokens and parent must hash to its
    key, a description must hash to it, and the checksum must be that of header and payload.
    Codecs are not tried, and what is sealed stays so: then the checksum is all there is.
    Raises ``CorruptPage`` that names the first thing that is wrong.
    """
    nbytes = max(int.from_bytes(record[_LENGTH_AT : _LENGTH_AT + 4], "little"), FIXED_NBYTES)
    header = parse(record[:nbytes])
    if header.key != key:
        raise CorruptPage(f"key: {header.key.hex()}, not {key.hex()}")
    if len(record) != header.header_nbytes + header.stored_nbytes:
        expected = header.header_nbytes + header.stored_nbytes
        raise CorruptPage(f"length: {len(record)} bytes, not {expected}")
    if checksum(record[: header.header_nbytes], record[header.header_nbytes :]) != header.checksum:
        raise CorruptPage("checksum")
    is_as_is = header.codec == CODEC_NONE and header.kind != KIND_SEALED
    is_known = header.codec in (CODEC_NONE, *ZSTD_CODECS)
    if not is_known or (is_as_is and header.raw_nbytes != header.stored_nbytes):
        raise CorruptPage(f"codec: {header.codec} of {header.raw_nbytes} bytes")
    if header.kind == KIND_NAMESPACE:
        decode_namespace(NamespaceDigest(key), bytes(record))
    elif not header.is_page:
        raise CorruptPage(f"kind: {header.kind}")
    elif header.kind == KIND_PAGE and sha256(header.parent + header.tokens).digest() != key:
        raise CorruptPage("tokens: with the parent key they do not hash to the page key")
    elif (header.number == 0) != (header.parent == header.namespace):
        raise CorruptPage(f"number: {header.number} does not fit the parent")
    return header


def encode_namespace(digest: NamespaceDigest, descriptor: bytes, created_us: int) -> list[bytes]:
    """Return the record that describes a namespace, as header and payload."""
    assert sha256(descriptor).digest() == digest
    nbytes = header_nbytes(0)
    header = bytearray(nbytes)
    _FIXED.pack_into(
        header, 0, MAGIC, FORMAT_VERSION, KIND_NAMESPACE, CODEC_NONE, 0, created_us,
        len(descriptor), len(descriptor), nbytes, 0, 0, 0, digest, digest, _NO_KEY,
    )  # fmt: skip
    view = memoryview(header)
    CHECKSUM.pack_into(header, CHECKSUM_START, checksum(view, memoryview(descriptor)))
    return [bytes(header), descriptor]


def decode_namespace(digest: NamespaceDigest, record: bytes) -> bytes:
    """Return the descriptor in a record that ``encode_namespace`` made.

    Raises ``CorruptPage`` where it is not what its key says.
    """
    header = parse(record)
    if header.kind != KIND_NAMESPACE:
        raise CorruptPage(f"kind: {header.kind}, not {KIND_NAMESPACE}")
    descriptor = record[header.header_nbytes :]
    if len(descriptor) != header.stored_nbytes:
        raise CorruptPage(f"length: {len(descriptor)} bytes, not {header.stored_nbytes}")
    if sha256(descriptor).digest() != digest:
        raise CorruptPage("checksum: the description does not hash to its key")
    return descriptor


def checksum(header: memoryview, payload: memoryview) -> int:
    """Return what a header must have as checksum: of all it says, and of the payload as stored."""
    seed = header[_CODEC_AT] + 256 * (header[_KIND_AT] == KIND_SEALED)
    summed = xxhash.xxh3_64(header[SUMMED_START:], seed)
    summed.update(payload)
    return summed.intdigest()
