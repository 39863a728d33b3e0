"""The record: what is written is proved, and anything else is named."""

import struct
from collections.abc import Callable
from hashlib import sha256

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from hicache.codec import (
    FIXED_NBYTES,
    FORMAT_VERSION,
    PageCodec,
    decode_namespace,
    encode_namespace,
    header_nbytes,
    parse,
    prove,
)
from hicache.errors import CorruptPage
from hicache.keys import NamespaceDigest, PageKey, PageRef
from tests.stores import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PAGE_NBYTES,
    PAGE_SIZE,
    content,
    page_refs,
)

CODEC = PageCodec(PAGE_SIZE, PAGE_NBYTES)
PAGE = page_refs(3)[2]
CREATED_US = 1_700_000_000_000_000


def encoded(page: PageRef = PAGE, namespace: NamespaceDigest = NAMESPACE) -> bytearray:
    """Return a whole record."""
    record = bytearray(CODEC.record_nbytes)
    view = memoryview(record)
    header, payload = view[: CODEC.header_nbytes], view[CODEC.header_nbytes :]
    payload[:] = content(page.key)
    CODEC.encode(header, payload, page, namespace, CREATED_US)
    return record


def verify(
    record: bytearray,
    page: PageRef = PAGE,
    namespace: NamespaceDigest = NAMESPACE,
    num_read: int | None = None,
) -> None:
    view = memoryview(record)
    CODEC.verify(
        view[: CODEC.header_nbytes],
        view[CODEC.header_nbytes :],
        page,
        namespace,
        len(record) if num_read is None else num_read,
    )


def changed(offset: int, value: bytes) -> bytearray:
    """Return a record with other bytes at an offset, and a checksum that fits them."""
    record = encoded()
    record[offset : offset + len(value)] = value
    record[8:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(record[16:], record[7]))
    return record


def test_a_record_proves_its_page() -> None:
    verify(encoded())


def test_the_header_says_what_the_page_is() -> None:
    header = parse(encoded())

    assert (header.version, header.kind, header.codec) == (FORMAT_VERSION, 0, 0)
    assert (header.namespace, header.key, header.parent) == (NAMESPACE, PAGE.key, PAGE.parent)
    assert (header.number, header.tokens) == (2, PAGE.tokens)
    assert header.stored_nbytes == header.raw_nbytes == PAGE_NBYTES
    assert header.created_us == CREATED_US
    assert header.header_nbytes == CODEC.header_nbytes


def test_s7_records_and_keys_are_the_same_in_every_process_and_version() -> None:
    """Where this fails, the format version has to change: old stores would no longer be read."""
    digest = sha256(encoded()).hexdigest()

    assert PAGE.key.hex() == "260e896bcbac5ade405e23df82eb922e32591a6da5ad46ae9e7b37fbe63e4b7e"
    assert digest == "396fd0f23183c8ac6b6ae467e2ed074896b0160cd4e0290ebb985c7a18af0de6", (
        "stores of the same format version would no longer be read"
    )


def test_the_table_of_offsets_is_true() -> None:
    record = encoded()

    assert record[:8] == b"HiCa" + struct.pack("<HBB", FORMAT_VERSION, 0, 0)
    assert record[8:16] == struct.pack("<Q", xxhash.xxh3_64_intdigest(record[16:], record[7]))
    assert record[16:40] == struct.pack("<QQQ", CREATED_US, PAGE_NBYTES, PAGE_NBYTES)
    assert record[40:56] == struct.pack("<IIII", CODEC.header_nbytes, 2, PAGE_SIZE, 0)
    assert record[56:152] == NAMESPACE + PAGE.key + PAGE.parent
    assert record[152 : 152 + 4 * PAGE_SIZE] == PAGE.tokens
    assert FIXED_NBYTES == 152


@pytest.mark.parametrize(
    ("page_size", "alignment", "nbytes"),
    [(1, 1, 192), (16, 1, 256), (64, 1, 448), (64, 4096, 4096), (10, 1, 192), (11, 1, 256)],
)
def test_headers_of_one_page_size_have_one_length(
    page_size: int, alignment: int, nbytes: int
) -> None:
    assert header_nbytes(page_size, alignment) == nbytes
    assert PageCodec(page_size, 64, alignment).header_nbytes == nbytes


def test_r13_one_flipped_bit_anywhere_is_found() -> None:
    record = encoded()

    for offset in range(len(record)):
        for bit in (0, 7):
            record[offset] ^= 1 << bit
            with pytest.raises(CorruptPage):
                verify(record)
            record[offset] ^= 1 << bit

    verify(record)


@given(num_read=st.integers(0, 4 * CODEC.record_nbytes))
def test_r1_any_other_length_is_corrupt(num_read: int) -> None:
    if num_read == CODEC.record_nbytes:
        return
    with pytest.raises(CorruptPage, match="length"):
        verify(encoded(), num_read=num_read)


@given(noise=st.binary(min_size=CODEC.record_nbytes, max_size=CODEC.record_nbytes))
def test_noise_is_no_page(noise: bytes) -> None:
    with pytest.raises(CorruptPage):
        verify(bytearray(noise))


@pytest.mark.parametrize(
    ("offset", "value", "name"),
    [
        (0, b"MIHA", "magic"),
        (4, struct.pack("<H", FORMAT_VERSION + 1), "version"),
        (6, b"\x01", "kind"),
        (7, b"\x01", "codec"),
        (24, struct.pack("<Q", PAGE_NBYTES - 1), "length"),
        (32, struct.pack("<Q", PAGE_NBYTES + 1), "length"),
        (40, struct.pack("<I", CODEC.header_nbytes - 1), "length"),
        (40, struct.pack("<I", CODEC.header_nbytes + 64), "length"),
        (44, struct.pack("<I", 3), "number"),
        (48, struct.pack("<I", PAGE_SIZE - 1), "tokens"),
        (48, struct.pack("<I", 1 << 31), "length"),
        (56, OTHER_NAMESPACE, "namespace"),
        (88, bytes(32), "key"),
        (120, bytes(32), "parent"),
        (152, b"\xff\xff", "tokens"),
        (152 + 4 * PAGE_SIZE, b"x", "padding"),
    ],
)
def test_what_differs_is_named(offset: int, value: bytes, name: str) -> None:
    with pytest.raises(CorruptPage, match=f"^{name}"):
        verify(changed(offset, value))


def test_another_payload_has_another_checksum() -> None:
    record = encoded()
    record[CODEC.header_nbytes :] = bytes(PAGE_NBYTES)

    with pytest.raises(CorruptPage, match=r"^checksum"):
        verify(record)


def test_s8_a_key_that_collides_does_not_make_other_tokens_a_hit() -> None:
    other = PageRef(PAGE.key, PAGE.parent, PAGE.number, bytes(len(PAGE.tokens)))

    with pytest.raises(CorruptPage, match=r"^tokens"):
        verify(encoded(other))


def test_r3_a_page_of_another_namespace_is_refused() -> None:
    with pytest.raises(CorruptPage, match=r"^namespace"):
        verify(encoded(namespace=OTHER_NAMESPACE))


def test_what_is_shorter_than_a_header_is_refused() -> None:
    with pytest.raises(CorruptPage, match="length"):
        parse(encoded()[: FIXED_NBYTES - 1])


# ---------------------------------------------------------------- scanned headers


def _is_consistent(record: Buffer, key: PageKey = PAGE.key) -> bool:
    page = CODEC.page_of(key, record, NAMESPACE)
    assert page is None or page.key == key
    return page is not None


def test_a_header_of_ours_is_consistent() -> None:
    first = page_refs(1)[0]

    assert _is_consistent(encoded())
    assert _is_consistent(encoded(first), first.key)


@pytest.mark.parametrize(
    "change",
    [
        lambda: changed(6, b"\x01"),
        lambda: changed(56, OTHER_NAMESPACE),
        lambda: changed(88, bytes(32)),
        lambda: changed(32, struct.pack("<Q", PAGE_NBYTES + 1)),
        lambda: changed(40, struct.pack("<I", FIXED_NBYTES + 4 * PAGE_SIZE)),
        lambda: changed(48, struct.pack("<I", PAGE_SIZE - 1)),
        lambda: changed(44, struct.pack("<I", 0)),
        lambda: changed(120, bytes(32)),
        lambda: changed(152, b"\xff\xff"),
        lambda: changed(0, b"X"),
    ],
    ids=[
        "kind",
        "namespace",
        "key",
        "length",
        "header",
        "tokens",
        "number",
        "parent",
        "hash",
        "magic",
    ],
)
def test_a_header_that_contradicts_itself_is_not(change: Callable[[], Buffer]) -> None:
    assert not _is_consistent(change())


def test_a_header_under_another_key_is_not() -> None:
    assert not _is_consistent(encoded(), PageKey(bytes(32)))


# ---------------------------------------------------------------- descriptions of namespaces


DESCRIPTOR = b"what a namespace is"
DIGEST = NamespaceDigest(sha256(DESCRIPTOR).digest())


def _description() -> bytes:
    return b"".join(encode_namespace(DIGEST, DESCRIPTOR, CREATED_US))


def test_a_description_comes_back() -> None:
    assert decode_namespace(DIGEST, _description()) == DESCRIPTOR


def test_a_description_has_a_checksum_and_no_tokens() -> None:
    record = _description()
    header = parse(record)

    assert header.checksum == xxhash.xxh3_64_intdigest(record[16:])
    assert header.key == PageKey(DIGEST)
    assert (header.namespace, header.tokens) == (DIGEST, b"")
    assert header.created_us == CREATED_US


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (encoded(), "kind"),
        (_description() + b"x", "length"),
        (_description()[:-1], "length"),
        (_description()[:-1] + b"x", "checksum"),
        (b"", "length"),
    ],
)
def test_what_is_no_description_is_named(record: bytes, name: str) -> None:
    with pytest.raises(CorruptPage, match=f"^{name}"):
        decode_namespace(DIGEST, bytes(record))


# ---------------------------------------------------------------- records that nobody expects


def _page() -> bytes:
    return bytes(encoded())


def _sealed(record: bytes, offset: int, value: bytes) -> bytes:
    """Return a record with other bytes at an offset, and a checksum that fits them."""
    changed = bytearray(record)
    changed[offset : offset + len(value)] = value
    changed[8:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(changed[16:], changed[7]))
    return bytes(changed)


def test_a_record_proves_itself_to_those_who_expect_nothing() -> None:
    first = page_refs(1)[0]

    assert prove(PAGE.key, memoryview(_page())).tokens == PAGE.tokens
    assert prove(first.key, memoryview(encoded(first))).number == 0
    assert prove(PageKey(DIGEST), memoryview(_description())).namespace == DIGEST


def test_r13_one_flipped_bit_anywhere_is_found_without_knowing_the_page() -> None:
    for key, record in ((PAGE.key, encoded()), (PageKey(DIGEST), bytearray(_description()))):
        for offset in range(len(record)):
            for bit in (0, 7):
                record[offset] ^= 1 << bit
                with pytest.raises(CorruptPage):
                    prove(key, memoryview(record))
                record[offset] ^= 1 << bit

        prove(key, memoryview(record))


@pytest.mark.parametrize(
    ("record", "key", "name"),
    [
        (b"", PAGE.key, "length"),
        (_page()[:-1], PAGE.key, "length"),
        (_page() + b"x", PAGE.key, "length"),
        (_page(), PageKey(bytes(32)), "key"),
        (_sealed(_page(), 7, b"\x07"), PAGE.key, "codec"),
        (_sealed(_page(), 32, bytes(8)), PAGE.key, "codec"),
        (_sealed(_page(), 6, b"\x07"), PAGE.key, "kind"),
        (_sealed(_page(), 44, struct.pack("<I", 0)), PAGE.key, "number"),
        (_sealed(_page(), 152, b"\xff\xff"), PAGE.key, "tokens"),
        (_sealed(_page(), 120, bytes(32)), PAGE.key, "tokens"),
        (_sealed(_description(), len(_description()) - 1, b"x"), PageKey(DIGEST), "checksum"),
    ],
)
def test_what_a_record_lacks_to_prove_itself_is_named(
    record: bytes, key: PageKey, name: str
) -> None:
    with pytest.raises(CorruptPage, match=f"^{name}"):
        prove(key, memoryview(record))
