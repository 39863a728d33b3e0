"""The record: what stands before a page's bytes in storage, so that they prove what they are.

A record is a header and a payload. Every header of one page size has the same length, so that
``get`` can scatter a record into a header buffer and the page itself. Little-endian:

====== ====== ==============================================================
offset nbytes
====== ====== ==============================================================
0      4      magic, ``HiCa``
4      2      format version
6      1      kind: 0 a page, 1 the description of a namespace
7      1      codec of the payload: 0 none, 1 zstd (not written yet)
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

The first eight bytes are outside the checksum, because each value of them that we accept is known.
The description of a namespace has no tokens, its digest as key, zeros as parent, and is proved by
hashing: SHA-256 of the payload is the key.

This module knows bytes. It reads no clock and no file, and never copies a payload.
"""

import struct
from dataclasses import dataclass
from hashlib import sha256

import xxhash
from typing_extensions import Buffer

from hicache.errors import CorruptPage
from hicache.keys import KEY_NBYTES, TOKEN_NBYTES, NamespaceDigest, PageKey, PageRef

MAGIC = b"HiCa"
FORMAT_VERSION = 1
KIND_PAGE, KIND_NAMESPACE = 0, 1
CODEC_NONE, CODEC_ZSTD = 0, 1

_FIXED = struct.Struct("<4sHBBQQQQIIII32s32s32s")
_PROVEN = struct.Struct("<QQIIII32s32s32s")
"""Bytes 24 to 152: with the tokens, all that a page is expected to be."""
_CHECKSUM = struct.Struct("<Q")
_CREATED = struct.Struct("<Q")
_CHECKSUM_START, _SUMMED_START, _PROVEN_START, _LENGTH_AT = 8, 16, 24, 40
_PAGE_PREFIX = struct.pack("<4sHBB", MAGIC, FORMAT_VERSION, KIND_PAGE, CODEC_NONE)
_NO_KEY = bytes(KEY_NBYTES)
_MIN_ALIGNMENT = 64

FIXED_NBYTES = _FIXED.size
"""Bytes of a header before its tokens."""


def header_nbytes(page_size: int, alignment: int = 1) -> int:
    """Return the length of the header of every page of ``page_size`` tokens."""
    unit = max(alignment, _MIN_ALIGNMENT)
    return -(-(FIXED_NBYTES + TOKEN_NBYTES * page_size) // unit) * unit


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
    namespace: NamespaceDigest
    key: PageKey
    parent: bytes
    tokens: bytes


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
    end = FIXED_NBYTES + TOKEN_NBYTES * num_tokens
    if nbytes < end:
        raise CorruptPage(f"length: {num_tokens} tokens in a header of {nbytes} bytes")
    return Header(
        version, kind, codec, checksum, created_us, stored_nbytes, raw_nbytes, nbytes, number,
        NamespaceDigest(namespace), PageKey(key), parent, raw[FIXED_NBYTES:end],
    )  # fmt: skip


def prove(key: PageKey, record: memoryview) -> Header:
    """Return the header of a whole record that is what it says, and belongs under its key.

    For those who look at a store and expect nothing: a page's tokens and parent must hash to its
    key, a description must hash to it, and the checksum must be that of header and payload.
    Raises ``CorruptPage`` that names the first thing that is wrong.
    """
    nbytes = max(int.from_bytes(record[_LENGTH_AT : _LENGTH_AT + 4], "little"), FIXED_NBYTES)
    header = parse(record[:nbytes])
    if header.key != key:
        raise CorruptPage(f"key: {header.key.hex()}, not {key.hex()}")
    if len(record) != header.header_nbytes + header.stored_nbytes:
        expected = header.header_nbytes + header.stored_nbytes
        raise CorruptPage(f"length: {len(record)} bytes, not {expected}")
    if _checksum(record[: header.header_nbytes], record[header.header_nbytes :]) != header.checksum:
        raise CorruptPage("checksum")
    if header.codec != CODEC_NONE or header.raw_nbytes != header.stored_nbytes:
        raise CorruptPage(f"codec: {header.codec} of {header.raw_nbytes} bytes")
    if header.kind == KIND_NAMESPACE:
        decode_namespace(NamespaceDigest(key), bytes(record))
    elif header.kind != KIND_PAGE:
        raise CorruptPage(f"kind: {header.kind}")
    elif sha256(header.parent + header.tokens).digest() != key:
        raise CorruptPage("tokens: with the parent key they do not hash to the page key")
    elif (header.number == 0) != (header.parent == header.namespace):
        raise CorruptPage(f"number: {header.number} does not fit the parent")
    return header


class PageCodec:
    """Headers of the pages of one shape: writes them, and proves what is read.

    Thread-safe: it holds nothing that changes.
    """

    def __init__(self, page_size: int, page_nbytes: int, alignment: int = 1) -> None:
        self.page_size = page_size
        self.page_nbytes = page_nbytes
        self.header_nbytes = header_nbytes(page_size, alignment)
        self.record_nbytes = self.header_nbytes + page_nbytes
        self._tokens_nbytes = page_size * TOKEN_NBYTES
        self._padding = bytes(self.header_nbytes - FIXED_NBYTES - self._tokens_nbytes)

    def encode(
        self,
        header: memoryview,
        payload: memoryview,
        page: PageRef,
        namespace: NamespaceDigest,
        created_us: int,
    ) -> None:
        """Write the header of ``payload`` into ``header``, which is ``header_nbytes`` long.

        The payload is read once, for its checksum, and must not change until it is stored.
        """
        assert len(header) == self.header_nbytes
        assert len(payload) == self.page_nbytes
        assert len(page.tokens) == self._tokens_nbytes
        header[:_CHECKSUM_START] = _PAGE_PREFIX
        _CREATED.pack_into(header, _SUMMED_START, created_us)
        header[_PROVEN_START:] = self._proven(page, namespace)
        _CHECKSUM.pack_into(header, _CHECKSUM_START, _checksum(header, payload))

    def verify(
        self,
        header: memoryview,
        payload: memoryview,
        page: PageRef,
        namespace: NamespaceDigest,
        num_read: int,
    ) -> None:
        """Return if these are the header and payload of ``page``, bit for bit as stored.

        ``num_read`` is the length that the backend gave: header and payload may hold anything
        beyond it. Raises ``CorruptPage`` that names the first thing that differs.
        """
        if num_read != self.record_nbytes:
            raise CorruptPage(f"length: {num_read} bytes, not {self.record_nbytes}")
        raw = header.tobytes()
        if not raw.startswith(_PAGE_PREFIX) or raw[_PROVEN_START:] != self._proven(page, namespace):
            raise CorruptPage(self._difference(raw, page, namespace))
        (expected,) = _CHECKSUM.unpack_from(header, _CHECKSUM_START)
        if _checksum(header, payload) != expected:
            raise CorruptPage("checksum")

    def is_consistent(self, key: PageKey, header: Header, namespace: NamespaceDigest) -> bool:
        """Whether a header found by a scan can be a page of ours, of this namespace.

        Its key must be the hash of its parent and tokens. The payload is not proved.
        """
        return (
            header.kind == KIND_PAGE
            and header.namespace == namespace
            and header.key == key
            and header.header_nbytes == self.header_nbytes
            and header.raw_nbytes == self.page_nbytes
            and len(header.tokens) == self._tokens_nbytes
            and (header.number == 0) == (header.parent == namespace)
            and sha256(header.parent + header.tokens).digest() == key
        )

    def _proven(self, page: PageRef, namespace: NamespaceDigest) -> bytes:
        fixed = _PROVEN.pack(
            self.page_nbytes, self.page_nbytes, self.header_nbytes, page.number, self.page_size, 0,
            namespace, page.key, page.parent,
        )  # fmt: skip
        return b"".join((fixed, page.tokens, self._padding))

    def _difference(self, raw: bytes, page: PageRef, namespace: NamespaceDigest) -> str:
        """Return what a header has that is not as expected, in words."""
        try:
            header = parse(raw)
        except CorruptPage as error:
            return str(error)
        pairs = {
            "kind": (header.kind, KIND_PAGE),
            "codec": (header.codec, CODEC_NONE),
            "namespace": (header.namespace.hex(), namespace.hex()),
            "key": (header.key.hex(), page.key.hex()),
            "parent": (header.parent.hex(), page.parent.hex()),
            "number": (header.number, page.number),
            "tokens": (header.tokens.hex(), page.tokens.hex()),
            "length": (
                (header.header_nbytes, header.stored_nbytes, header.raw_nbytes),
                (self.header_nbytes, self.page_nbytes, self.page_nbytes),
            ),
        }
        for name, (found, expected) in pairs.items():
            if found != expected:
                return f"{name}: {found}, not {expected}"
        return "padding"


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
    _CHECKSUM.pack_into(header, _CHECKSUM_START, _checksum(view, memoryview(descriptor)))
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


def _checksum(header: memoryview, payload: memoryview) -> int:
    summed = xxhash.xxh3_64(header[_SUMMED_START:])
    summed.update(payload)
    return summed.intdigest()
