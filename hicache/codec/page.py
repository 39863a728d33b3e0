"""Pages of one shape to records and back: as they are, made smaller, or sealed.

What is made smaller or sealed lies in scratch on its way, as long as a page and a little: the page
itself is written only with bytes that were proved. In this order, each on what the one before let
through: the length that was read, the header against what is expected, the checksum of what is
stored, the seal, the checksum of what comes out of a codec.
"""

import struct
import threading
from hashlib import sha256

from typing_extensions import Buffer

from hicache.codec.planes import Planes
from hicache.codec.record import (
    CHECKSUM,
    CHECKSUM_START,
    CODEC_NONE,
    FIXED_NBYTES,
    FORMAT_VERSION,
    KIND_PAGE,
    KIND_SEALED,
    MAGIC,
    SEALED_FIXED_NBYTES,
    SUMMED_START,
    ZSTD_CODECS,
    Header,
    checksum,
    header_nbytes,
    parse,
    peek,
)
from hicache.codec.sealing import TAG_NBYTES, Keyring, Master, Sealed
from hicache.config import CodecName
from hicache.errors import CorruptPage
from hicache.keys import TOKEN_NBYTES, NamespaceDigest, PageKey, PageRef

_PREFIX = struct.Struct("<4sHBB")
_CREATED = struct.Struct("<Q")
_PROVEN = struct.Struct("<QQIIII32s32s32s")
"""Bytes 24 to 152: with the tokens, all that a page is expected to be."""
_PROVEN_START = 24
_CODEC_AT = 7
_NAMES = (
    *("magic", "version", "kind", "codec"),
    *("length", "length", "length", "number", "tokens", "zero", "namespace", "key", "parent"),
)
"""What these two consist of."""
_SLOT_UNIT = 64


class PageCodec:
    """Makes the records of one store, and proves what is read from it. Thread-safe."""

    def __init__(
        self,
        page_size: int,
        page_nbytes: int,
        alignment: int = 1,
        *,
        codec: CodecName = "none",
        level: int = 1,
        item_nbytes: int = 1,
        keyring: Keyring | None = None,
    ) -> None:
        """``item_nbytes``: of one number of KV, for codecs that take numbers apart."""
        self.page_size = page_size
        self.page_nbytes = page_nbytes
        self.keyring = keyring
        self.is_direct = codec == "none" and keyring is None
        """Whether payloads are pages as they are, written from there and read to there."""
        self._fixed_nbytes = FIXED_NBYTES if keyring is None else SEALED_FIXED_NBYTES
        self._tag_nbytes = 0 if keyring is None else TAG_NBYTES
        self.header_nbytes = header_nbytes(page_size, alignment, self._fixed_nbytes)
        self.record_nbytes = self.header_nbytes + page_nbytes
        """Of a page as it is, not sealed."""
        self.slot_nbytes = _rounded(page_nbytes + self._tag_nbytes, max(alignment, _SLOT_UNIT))
        """Scratch that one page needs."""
        self._alignment = alignment
        self._tokens_nbytes = page_size * TOKEN_NBYTES
        self._padding = bytes(self.header_nbytes - self._fixed_nbytes - self._tokens_nbytes)
        self._num_planes = {"none": 0, "zstd": 1, "zstd-planes": item_nbytes}[codec]
        assert self._num_planes in (CODEC_NONE, *ZSTD_CODECS)
        assert page_nbytes % item_nbytes == 0
        self._planes = Planes(page_nbytes, level)
        self._rooms = _Rooms(self.slot_nbytes)

    # ------------------------------------------------------------ pages as they are

    def encode(
        self,
        header: memoryview,
        payload: memoryview,
        page: PageRef,
        namespace: NamespaceDigest,
        created_us: int,
    ) -> None:
        """Write the header of ``payload``, a page as it is, into ``header``.

        The payload is read once, for its checksum, and must not change until it is stored.
        """
        assert self.keyring is None
        assert len(payload) == self.page_nbytes
        self._write(header, CODEC_NONE, len(payload), page, namespace, created_us)
        CHECKSUM.pack_into(header, CHECKSUM_START, checksum(header, payload))

    def verify(
        self,
        header: memoryview,
        payload: memoryview,
        page: PageRef,
        namespace: NamespaceDigest,
        num_read: int,
    ) -> None:
        """Return if these are the header and payload of ``page``, bit for bit as stored.

        ``num_read`` is how long the record was. Else raise ``CorruptPage`` that names the first
        thing that is wrong. The payload is read once.
        """
        if num_read != self.record_nbytes:
            raise CorruptPage(f"length: {num_read} bytes, not {self.record_nbytes}")
        self._check(header, CODEC_NONE, payload, page, namespace)

    def is_coded(self, header: memoryview) -> bool:
        """Whether what was read as a page looks as if it had to be decoded."""
        prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, KIND_PAGE, 0)[:_CODEC_AT]
        return header[:_CODEC_AT] == prefix and header[_CODEC_AT] in ZSTD_CODECS

    # ------------------------------------------------------------ pages by way of scratch

    def code(
        self,
        header: memoryview,
        slot: memoryview,
        payload: memoryview,
        page: PageRef,
        namespace: NamespaceDigest,
        created_us: int,
    ) -> memoryview:
        """Write the header of the page in ``payload``, and its coded form; return what to store.

        That lies in ``slot``, or is ``payload`` itself where coding it gains nothing.
        """
        assert len(slot) == self.slot_nbytes
        room = slot if self.keyring is None else self._rooms.room
        nbytes = None
        if self._num_planes:
            nbytes = self._planes.encode(self._num_planes, payload, room)
        codec = CODEC_NONE if nbytes is None else self._num_planes
        coded = self._padded(payload if nbytes is None else room[:nbytes], room)
        self._write(header, codec, len(coded) + self._tag_nbytes, page, namespace, created_us)
        if self.keyring is not None:
            coded = self.keyring.first.seal_payload(header, coded, slot, namespace)
        CHECKSUM.pack_into(header, CHECKSUM_START, checksum(header, coded))
        return coded

    def decode(
        self,
        header: memoryview,
        slot: memoryview,
        payload: memoryview,
        page: PageRef,
        namespace: NamespaceDigest,
        num_read: int,
    ) -> None:
        """Write the page that a record in ``header`` and ``slot`` holds into ``payload``.

        ``num_read`` is how long the record was. Raises ``CorruptPage`` as ``verify`` does, and
        where the codec is not known; ``payload`` is untouched then.
        """
        nbytes = num_read - self.header_nbytes
        if not 0 < nbytes <= len(slot):
            raise CorruptPage(f"length: {num_read} bytes, not up to {self.record_nbytes}")
        codec, coded = header[_CODEC_AT], slot[:nbytes]
        if codec not in (CODEC_NONE, *ZSTD_CODECS):
            raise CorruptPage(f"codec: {codec} is not known")
        self._check(header, codec, coded, page, namespace)
        if self.keyring is not None:
            master = self.keyring.of(header)
            coded = master.open_payload(header, coded, self._rooms.room, namespace)
        if codec != CODEC_NONE:
            self._planes.decode(codec, coded, payload)
        elif len(coded) < self.page_nbytes:
            raise CorruptPage(f"length: a page of {len(coded)} bytes")
        else:
            payload[:] = coded[: self.page_nbytes]

    # ------------------------------------------------------------ scanned headers

    def page_of(self, key: PageKey, header: Buffer, namespace: NamespaceDigest) -> PageRef | None:
        """Return what page of this namespace a header that was found under ``key`` stands before.

        ``None`` where it is none, of another shape, sealed with a key that is not here, or
        contradicts itself: a page's key must be the hash of its parent and tokens. The payload is
        not proved.
        """
        try:
            found = parse(header)
            if not self._has_our_shape(found, namespace):
                return None
            raw = memoryview(header)[: self.header_nbytes]
            master = self._master(raw)
            page = self._page(found, raw, master)
        except CorruptPage:
            return None
        _, own_key, parent = _identity(master, page, namespace)
        is_consistent = (found.key, found.parent) == (own_key, parent) == (key, parent)
        is_first = page.number == 0
        return page if is_consistent and is_first == (page.parent == namespace) else None

    def key_and_parent(self, key: PageKey, header: Buffer) -> tuple[PageKey, bytes] | None:
        """Return which page's record this header, found under ``key``, says it begins, and whose
        child that is, whatever its namespace and shape.

        ``None`` where it is of no page, or sealed with a key that is not here. Nothing is proved.
        """
        try:
            found = parse(header)
            if not found.is_page or not found.num_tokens:
                return None
            if found.kind == KIND_PAGE:
                return key, found.parent
            if self.keyring is None:
                return None
            raw = memoryview(header)[: found.header_nbytes]
            nbytes = found.num_tokens * TOKEN_NBYTES
            sealed = self.keyring.of(raw).open_header(raw, nbytes, found.namespace)
        except CorruptPage:
            return None
        return PageKey(sha256(sealed.parent + sealed.tokens).digest()), sealed.parent

    def is_foreign(self, header: Buffer) -> bool:
        """Whether this stands before a page that was sealed with a key that is not here."""
        try:
            is_sealed = peek(header).kind == KIND_SEALED
        except CorruptPage:
            return False
        return is_sealed and (self.keyring is None or self.keyring.find(memoryview(header)) is None)

    def _has_our_shape(self, found: Header, namespace: NamespaceDigest) -> bool:
        return (
            found.kind == (KIND_PAGE if self.keyring is None else KIND_SEALED)
            and found.namespace == namespace
            and found.header_nbytes == self.header_nbytes
            and found.raw_nbytes == self.page_nbytes
            and found.num_tokens == self.page_size
        )

    def _page(self, found: Header, header: memoryview, master: Master | None) -> PageRef:
        """Return the page that a header speaks of, its seal opened."""
        parent, tokens = found.parent, found.tokens
        if master is not None:
            sealed = master.open_header(header, self._tokens_nbytes, found.namespace)
            parent, tokens = sealed.parent, sealed.tokens
        key = PageKey(sha256(parent + tokens).digest())
        return PageRef(key, parent, found.number, tokens)

    # ------------------------------------------------------------ helpers

    def _master(self, header: memoryview) -> Master | None:
        """Return what a record was sealed with; ``None`` where nothing here is sealed."""
        return None if self.keyring is None else self.keyring.of(header)

    def _write(
        self,
        header: memoryview,
        codec: int,
        stored_nbytes: int,
        page: PageRef,
        namespace: NamespaceDigest,
        created_us: int,
    ) -> None:
        """Write a header, but for its checksum."""
        assert len(header) == self.header_nbytes
        assert len(page.tokens) == self._tokens_nbytes
        master = None if self.keyring is None else self.keyring.first
        prefix, proven = self._expected(master, codec, stored_nbytes, page, namespace)
        header[:CHECKSUM_START] = prefix
        _CREATED.pack_into(header, SUMMED_START, created_us)
        header[_PROVEN_START:FIXED_NBYTES] = proven
        if master is None:
            header[FIXED_NBYTES:] = page.tokens + self._padding
        else:
            master.seal_header(header, page.parent, page.tokens, namespace)

    def _check(
        self,
        header: memoryview,
        codec: int,
        stored: memoryview,
        page: PageRef,
        namespace: NamespaceDigest,
    ) -> None:
        """Return if this is the header of a page, coded so, with this payload."""
        raw, master = bytes(header), self._master(header)
        prefix, proven = self._expected(master, codec, len(stored), page, namespace)
        if raw[:CHECKSUM_START] != prefix or raw[_PROVEN_START:FIXED_NBYTES] != proven:
            raise CorruptPage(_difference(raw, prefix, proven))
        if master is None and raw[FIXED_NBYTES:] != page.tokens + self._padding:
            is_behind = raw[FIXED_NBYTES:].startswith(page.tokens)
            raise CorruptPage("padding: not zero" if is_behind else "tokens: others")
        (expected,) = CHECKSUM.unpack_from(header, CHECKSUM_START)
        if checksum(header, stored) != expected:
            raise CorruptPage("checksum")
        if master is not None:
            sealed = master.open_header(header, self._tokens_nbytes, namespace)
            if sealed != Sealed(page.parent, page.tokens):
                raise CorruptPage("tokens: others, or of another parent")

    def _expected(
        self,
        master: Master | None,
        codec: int,
        stored_nbytes: int,
        page: PageRef,
        namespace: NamespaceDigest,
    ) -> tuple[bytes, bytes]:
        """Return the first 8 bytes of a header, and those from 24 to 152."""
        kind, key, parent = _identity(master, page, namespace)
        proven = _PROVEN.pack(
            stored_nbytes, self.page_nbytes, self.header_nbytes, page.number, self.page_size, 0,
            namespace, key, parent,
        )  # fmt: skip
        return _PREFIX.pack(MAGIC, FORMAT_VERSION, kind, codec), proven

    def _padded(self, coded: memoryview, room: memoryview) -> memoryview:
        """Return it with zeros behind it, in ``room``, so that it is as long as backends want."""
        length = len(coded)
        nbytes = _rounded(length + self._tag_nbytes, self._alignment) - self._tag_nbytes
        if nbytes == length:
            return coded
        room[:length] = coded
        room[length:nbytes] = bytes(nbytes - length)
        return room[:nbytes]


class _Rooms(threading.local):
    """Room of each thread for what is made smaller and not sealed yet, or not sealed any more."""

    def __init__(self, nbytes: int) -> None:
        self.room = memoryview(bytearray(nbytes))


def _identity(
    master: Master | None, page: PageRef, namespace: NamespaceDigest
) -> tuple[int, PageKey, bytes]:
    """Return kind, key and parent, as the record of a page has them."""
    if master is None:
        return KIND_PAGE, page.key, page.parent
    return KIND_SEALED, master.name(page.key), master.parent_name(page.parent, namespace)


def _difference(raw: bytes, prefix: bytes, proven: bytes) -> str:
    """Return what a header has that is not as expected, in words."""
    try:
        parse(raw)
    except CorruptPage as error:
        return str(error)
    found = (*_PREFIX.unpack_from(raw), *_PROVEN.unpack_from(raw, _PROVEN_START))
    expected = (*_PREFIX.unpack(prefix), *_PROVEN.unpack(proven))
    return next(
        f"{name}: {_shown(one)}, not {_shown(other)}"
        for name, one, other in zip(_NAMES, found, expected, strict=True)
        if one != other
    )


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
