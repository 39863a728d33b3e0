"""Records of pages that are made smaller, sealed, or both: round trips, and what is refused."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.codec import KIND_SEALED, Keyring, PageCodec, parse, prove
from hicache.config import CodecName
from hicache.errors import CorruptPage
from hicache.keys import NamespaceDigest, PageKey, PageRef
from tests.stores import NAMESPACE, OTHER_NAMESPACE, PAGE_SIZE, page_refs
from tests.test_codec_planes import NBYTES, floats

CREATED_US = 1_700_000_000_000_000
FIRST, _, PAGE = page_refs(3)
KEYS = [Random(seed).randbytes(32) for seed in range(3)]
KEYRING = Keyring(KEYS[:1])
MARK = b"\xa5" * NBYTES
SECRETS: Sequence[Keyring | None] = (None, KEYRING)
CODECS: Sequence[CodecName] = ("none", "zstd", "zstd-planes")


def make(
    codec: CodecName = "zstd-planes", keyring: Keyring | None = None, alignment: int = 1
) -> PageCodec:
    return PageCodec(
        PAGE_SIZE, NBYTES, alignment, codec=codec, level=1, item_nbytes=4, keyring=keyring
    )


@dataclass
class Record:
    """A record as it lies in storage."""

    codec: PageCodec
    raw: bytearray

    @property
    def key(self) -> PageKey:
        return parse(self.raw).key

    def change(self, offset: int, value: bytes) -> "Record":
        """Write something into it, and a checksum that fits."""
        self.raw[offset : offset + len(value)] = value
        seed = self.raw[7] + 256 * (self.raw[6] == KIND_SEALED)
        self.raw[8:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(self.raw[16:], seed))
        return self


def stored(
    codec: PageCodec,
    content: bytes,
    page: PageRef = PAGE,
    namespace: NamespaceDigest = NAMESPACE,
) -> Record:
    header, slot = bytearray(codec.header_nbytes), bytearray(codec.slot_nbytes)
    payload = codec.code(
        memoryview(header), memoryview(slot), memoryview(content), page, namespace, CREATED_US
    )
    return Record(codec, bytearray(header + payload))


def read(
    codec: PageCodec,
    raw: bytes | bytearray,
    page: PageRef = PAGE,
    namespace: NamespaceDigest = NAMESPACE,
) -> bytes:
    """Return the page of a record; assert that one that is refused writes nothing."""
    header = bytearray(raw[: codec.header_nbytes].ljust(codec.header_nbytes, b"\0"))
    slot = bytearray(raw[codec.header_nbytes :][: codec.slot_nbytes].ljust(codec.slot_nbytes, b"?"))
    payload = bytearray(MARK)
    try:
        codec.decode(
            memoryview(header), memoryview(slot), memoryview(payload), page, namespace, len(raw)
        )
    except CorruptPage:
        assert payload == MARK, "the page was written"
        raise
    return bytes(payload)


@contextmanager
def refused(match: str | None = None) -> Iterator[None]:
    with pytest.raises(CorruptPage, match=match):
        yield


@pytest.mark.parametrize("alignment", [1, 512])
@pytest.mark.parametrize("keyring", SECRETS, ids=["plain", "sealed"])
@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=20)
@given(seed=st.integers(0, 99), kind=st.sampled_from(["floats", "noise", "zeros"]))
def test_what_is_stored_comes_back(
    name: CodecName, keyring: Keyring | None, alignment: int, seed: int, kind: str
) -> None:
    contents = {"floats": floats(4, seed), "noise": Random(seed).randbytes(NBYTES)}
    content = contents.get(kind, bytes(NBYTES))
    codec = make(name, keyring, alignment)

    record = stored(codec, content)

    assert len(record.raw) % alignment == 0
    assert read(codec, record.raw) == content
    header = parse(record.raw)
    assert header.is_page
    assert (header.raw_nbytes, header.number) == (NBYTES, 2)
    assert header.stored_nbytes == len(record.raw) - codec.header_nbytes
    assert prove(record.key, memoryview(record.raw)) == header


def test_coded_pages_are_smaller_and_noise_is_hardly_larger() -> None:
    codec, sealing = make(), make(keyring=KEYRING)

    assert len(stored(codec, floats(4)).raw) < 0.9 * NBYTES
    assert len(stored(sealing, floats(4)).raw) < 0.95 * NBYTES
    noise = Random(1).randbytes(NBYTES)
    assert len(stored(codec, noise).raw) == codec.record_nbytes
    assert len(stored(sealing, noise).raw) == sealing.record_nbytes + 16


@pytest.mark.parametrize("written", CODECS)
@pytest.mark.parametrize("reader", CODECS)
def test_whatever_a_store_writes_now_it_reads_what_it_wrote_before(
    written: CodecName, reader: CodecName
) -> None:
    raw = stored(make(written), floats(4)).raw

    assert read(make(reader), raw) == floats(4)
    assert make(reader).is_coded(memoryview(raw)) == (written != "none")


@pytest.mark.parametrize("keyring", SECRETS, ids=["plain", "sealed"])
def test_r13_one_flipped_bit_anywhere_is_found_and_writes_nothing(
    keyring: Keyring | None,
) -> None:
    codec = make(keyring=keyring)
    record = stored(codec, floats(4))
    raw = record.raw

    for offset in range(len(raw)):
        bit = 1 << offset % 8
        raw[offset] ^= bit
        with refused():
            read(codec, raw)
        with refused():
            prove(record.key, memoryview(raw))
        raw[offset] ^= bit

    assert read(codec, raw) == floats(4)


@pytest.mark.parametrize("offset", [0, 5, 6, 7, 16, 24, 44, 56, 88, 120, 160, 170, 176, 200, 230])
def test_a_sealed_header_that_was_changed_with_care_is_found(offset: int) -> None:
    codec = make(keyring=KEYRING)
    record = stored(codec, floats(4))

    with refused():
        read(codec, record.change(offset, bytes([record.raw[offset] ^ 1])).raw)


def test_a_sealed_payload_that_was_changed_with_care_is_found() -> None:
    codec = make(keyring=KEYRING)
    for offset in (codec.header_nbytes, 1000, -1):
        record = stored(codec, floats(4))
        at = offset % len(record.raw)
        with refused("seal: the payload"):
            read(codec, record.change(at, bytes([record.raw[at] ^ 1])).raw)


def test_a_payload_of_another_record_is_found() -> None:
    codec = make("none", KEYRING)
    one, other = stored(codec, floats(4)), stored(codec, floats(4, seed=1))

    mixed = other.raw[codec.header_nbytes :]
    with refused("seal: the payload"):
        read(codec, one.change(codec.header_nbytes, bytes(mixed)).raw)


@pytest.mark.parametrize("keyring", SECRETS, ids=["plain", "sealed"])
def test_r1_any_other_length_is_refused(keyring: Keyring | None) -> None:
    codec = make(keyring=keyring)
    raw = stored(codec, floats(4)).raw

    for length in [*range(0, len(raw), 37), len(raw) - 1]:
        with refused():
            read(codec, raw[:length])
    for extra in (b"\0", bytes(10_000)):
        with refused():
            read(codec, raw + extra)


@pytest.mark.parametrize("number", [3, 5, 128, 255])
def test_an_unknown_codec_is_refused(number: int) -> None:
    codec = make()
    record = stored(codec, floats(4)).change(7, bytes([number]))

    with refused(f"codec: {number} is not known"):
        read(codec, record.raw)
    assert not codec.is_coded(memoryview(record.raw))


def test_a_page_that_says_it_is_of_another_codec_is_refused() -> None:
    codec = make()
    for number in (0, 1, 2):
        with refused():
            read(codec, stored(codec, floats(4)).change(7, bytes([number])).raw)
    with refused():
        read(codec, stored(make("none"), floats(4)).change(7, b"\4").raw)


@pytest.mark.parametrize("keyring", SECRETS, ids=["plain", "sealed"])
def test_a_page_of_other_tokens_or_another_namespace_is_refused(keyring: Keyring | None) -> None:
    codec = make(keyring=keyring)
    raw = stored(codec, floats(4)).raw

    with refused("number|key"):
        read(codec, raw, FIRST)
    with refused("tokens"):
        read(codec, raw, PageRef(PAGE.key, PAGE.parent, PAGE.number, bytes(len(PAGE.tokens))))
    with refused("namespace"):
        read(codec, raw, namespace=OTHER_NAMESPACE)


# ---------------------------------------------------------------- sealed


def test_a_sealed_record_shows_neither_tokens_nor_keys() -> None:
    raw = bytes(stored(make(keyring=KEYRING), floats(4)).raw)

    for secret in (PAGE.tokens, PAGE.key, PAGE.parent, floats(4)[:16], KEYS[0]):
        assert secret not in raw
    assert parse(raw).tokens == b""
    assert bytes(NAMESPACE) in raw
    assert parse(stored(make(keyring=KEYRING), floats(4), FIRST).raw).parent == NAMESPACE


def test_no_two_records_are_sealed_alike() -> None:
    codec = make("none", KEYRING)

    raws = [bytes(stored(codec, floats(4)).raw) for _ in range(50)]

    assert len({raw[160:172] for raw in raws}) == 50
    assert len({raw[codec.header_nbytes :] for raw in raws}) == 50


def test_another_key_has_other_names_and_opens_nothing() -> None:
    mine, other = make(keyring=KEYRING), make(keyring=Keyring(KEYS[1:2]))
    record = stored(mine, floats(4))

    assert KEYRING.first.name(PAGE.key) == record.key
    assert Keyring(KEYS[1:2]).first.name(PAGE.key) != record.key
    with refused("^key: sealed with"):
        read(other, record.raw)
    assert other.page_of(record.key, record.raw, NAMESPACE) is None


def test_the_key_of_a_tenant_opens_nothing_of_another() -> None:
    """Even where a record says that it is the other's, and its names fit."""
    codec = make(keyring=KEYRING)
    record = stored(codec, floats(4)).change(56, OTHER_NAMESPACE)

    with refused("^seal: the header's"):
        read(codec, record.raw, namespace=OTHER_NAMESPACE)
    assert codec.page_of(record.key, record.raw, OTHER_NAMESPACE) is None


def test_after_a_rotation_what_the_old_key_sealed_is_read() -> None:
    old, new = make(keyring=Keyring(KEYS[:1])), make(keyring=Keyring([KEYS[1], KEYS[0]]))
    before, after = stored(old, floats(4)), stored(new, floats(4))

    assert read(new, before.raw) == read(new, after.raw) == floats(4)
    assert new.page_of(before.key, before.raw, NAMESPACE) == PAGE
    assert new.page_of(after.key, after.raw, NAMESPACE) == PAGE
    with refused("^key"):
        read(old, after.raw)


@pytest.mark.parametrize(("writer", "reader"), [(None, KEYRING), (KEYRING, None)])
def test_what_is_not_sealed_and_what_is_do_not_pass_for_each_other(
    writer: Keyring | None, reader: Keyring | None
) -> None:
    record = stored(make(keyring=writer), floats(4))

    with refused():
        read(make(keyring=reader), record.raw)
    assert make(keyring=reader).page_of(record.key, record.raw, NAMESPACE) is None


@pytest.mark.parametrize("keyring", SECRETS, ids=["plain", "sealed"])
def test_a_scan_finds_what_a_header_speaks_of(keyring: Keyring | None) -> None:
    codec = make(keyring=keyring)

    for page in (FIRST, PAGE):
        record = stored(codec, floats(4), page)
        header = record.raw[: codec.header_nbytes]
        assert codec.page_of(record.key, header, NAMESPACE) == page
        assert codec.page_of(record.key, header, OTHER_NAMESPACE) is None
        assert codec.page_of(PageKey(bytes(32)), header, NAMESPACE) is None


def test_who_has_not_the_key_knows_what_is_foreign() -> None:
    sealed, plain = stored(make(keyring=KEYRING), floats(4)), stored(make(), floats(4))
    mine, other, none = make(keyring=KEYRING), make(keyring=Keyring(KEYS[1:])), make()

    assert [codec.is_foreign(sealed.raw) for codec in (mine, other, none)] == [False, True, True]
    for codec in (mine, other, none):
        assert not codec.is_foreign(plain.raw)
        assert not codec.is_foreign(bytes(300))


def test_only_who_has_the_key_knows_which_page_a_sealed_record_begins() -> None:
    sealed, plain = stored(make(keyring=KEYRING), floats(4)), stored(make(), floats(4))
    mine, other, none = make(keyring=KEYRING), make(keyring=Keyring(KEYS[1:])), make()

    assert mine.key_and_parent(sealed.key, sealed.raw) == (PAGE.key, PAGE.parent)
    assert other.key_and_parent(sealed.key, sealed.raw) is None
    assert none.key_and_parent(sealed.key, sealed.raw) is None
    for codec in (mine, other, none):
        assert codec.key_and_parent(plain.key, plain.raw) == (PAGE.key, PAGE.parent)
        assert codec.key_and_parent(plain.key, bytes(300)) is None


def test_a_sealed_header_whose_names_do_not_fit_is_no_page() -> None:
    codec = make(keyring=KEYRING)
    name = KEYRING.first.name(FIRST.key)

    record = stored(codec, floats(4)).change(88, name)

    assert codec.page_of(name, record.raw, NAMESPACE) is None


def test_a_payload_too_short_for_a_page_is_refused() -> None:
    codec = make("none")
    record = stored(codec, floats(4))

    cut = Record(codec, record.raw[: codec.header_nbytes + 15])

    with refused("a page of 15 bytes"):
        read(codec, cut.change(24, struct.pack("<Q", 15)).raw)
