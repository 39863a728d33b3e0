"""``hicache store`` on pages that are sealed: what can be seen without the key, and with it."""

import struct

import pytest

from hicache.codec import Keyring, PageCodec
from hicache.codec.record import checksum
from hicache.keys import PageKey, PageRef
from tests.store_cli.made import LAYOUT, PAGE_SIZE, Made, description_of, namespace, pages_of

KEY = "ab" * 32
PROMPT = list(range(20))


def sealed(page: PageRef) -> tuple[PageKey, bytearray]:
    """Return a page as a store with a key keeps it."""
    keyring = Keyring([bytes.fromhex(KEY)])
    codec = PageCodec(PAGE_SIZE, LAYOUT.page_nbytes, keyring=keyring)
    header, slot = bytearray(codec.header_nbytes), memoryview(bytearray(codec.slot_nbytes))
    payload = memoryview(bytearray(LAYOUT.page_nbytes))
    coded = codec.code(memoryview(header), slot, payload, page, namespace().digest, 10**15)
    return keyring.first.name(page.key), header + coded


@pytest.fixture
def pages(made: Made) -> list[PageRef]:
    pages = pages_of(namespace(), PROMPT)
    records = [sealed(page) for page in pages]
    made.put(description_of(namespace()), *((key, bytes(record)) for key, record in records))
    return pages


@pytest.fixture
def with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_CACHE__STORAGE__KEY", KEY)


def test_without_the_key_pages_are_counted_checked_and_linked_and_not_read(
    made: Made, pages: list[PageRef]
) -> None:
    assert made.told("verify")["unopened"] == 5
    assert "5 records sealed with a key that is not in the settings" in made.run("verify")
    assert "5 sealed" in made.run("stat")
    [branch] = made.told("ls")[0]["branches"]
    assert (branch["text"], branch["pages"]) == ("(sealed)", 5)
    assert made.run("gc", "--unused-for", "0") == "nothing to remove\n"
    made.run("rm", "--tokens", "0,1", "--yes", code=2)


@pytest.mark.usefixtures("with_key")
def test_with_the_key_they_are_opened_listed_and_removed_by_prefix(
    made: Made, pages: list[PageRef]
) -> None:
    assert made.told("verify")["unopened"] == 0
    assert made.told("ls")[0]["branches"][0]["text"] == "0 1 2 3"

    assert made.told("rm", "--tokens", "0,1,2,3,4", "--yes")["groups"][0]["records"] == 4


@pytest.mark.usefixtures("with_key")
def test_what_was_changed_by_somebody_without_the_key_is_bad(
    made: Made, pages: list[PageRef]
) -> None:
    for at, offset in ((1, 200), (2, -5)):  # in the header's seal, in the payload's
        key, record = sealed(pages[at])
        record[offset] ^= 1
        view = memoryview(record)
        nbytes = len(record) - LAYOUT.page_nbytes - 16
        record[8:16] = struct.pack("<Q", checksum(view[:nbytes], view[nbytes:]))
        made.delete(key)
        made.put((key, bytes(record)))

    problems = {one["problem"] for one in made.told("verify", code=1)["records"]}

    assert problems == {"seal: the header's is broken", "seal: the payload's is broken"}


def test_they_are_moved_as_they_are(made: Made, pages: list[PageRef]) -> None:
    warm = made.path.parent / "warm"
    made.run("export", "-o", str(warm))
    made.delete(*(sealed(page)[0] for page in pages))

    assert made.told("import", str(warm))["stored"] == 5
    assert made.told("verify")["good"] == 6
