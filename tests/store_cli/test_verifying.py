"""``hicache store verify``: every record proved, what is bad named, and removed when asked."""

import os
import struct
from pathlib import Path

import xxhash

from hicache.keys import PageRef
from tests.store_cli.made import LAYOUT, Made, description_of, namespace, pages_of, record_of

PROMPT = list(range(40))


def payload(page: PageRef) -> bytes:
    return record_of(namespace(), page)[-LAYOUT.page_nbytes :]


def test_a_good_store_is_clean(made: Made) -> None:
    made.fill(namespace(), PROMPT)

    assert "nothing is wrong" in made.run("verify")
    told = made.told("verify")

    assert (told["good"], told["bad"]) == (11, 0)
    assert told["nbytes"] == 10 * len(
        record_of(namespace(), pages_of(namespace(), PROMPT)[0])
    ) + len(description_of(namespace())[1])
    assert told["gb_per_s"] > 0


def test_each_kind_of_damage_is_found_named_and_removed_only_when_asked(made: Made) -> None:
    [pages] = made.fill(namespace(), PROMPT)
    made.flip(payload(pages[3]), 5)
    made.flip(payload(pages[5]), -40)  # a token in its header
    made.flip(payload(pages[7]), -222)  # the frame before its record
    bad = {pages[at].key.hex() for at in (3, 5, 7)}

    for told in (made.told("verify", code=1), made.told("verify", code=1)):
        # Looking changes nothing.
        assert {one["key"] for one in told["records"]} == bad
        assert (told["good"], told["bad"], told["removed"]) == (8, 3, 0)
    problems = {one["key"]: one for one in made.told("verify", code=1)["records"]}
    assert problems[pages[3].key.hex()]["problem"] == "checksum"
    assert problems[pages[3].key.hex()]["page"] == 3
    assert problems[pages[7].key.hex()]["problem"] == "frame: damaged, or its end is missing"
    assert "3 bad records: --repair removes them" in made.run("verify", code=1)

    assert "3 bad records removed" in made.run("verify", "--repair", code=1)

    assert {key.hex() for key in made.held()}.isdisjoint(bad)
    assert made.told("verify")["good"] == 8


def test_what_is_bad_is_kept_aside_when_asked(made: Made, tmp_path: Path) -> None:
    [pages] = made.fill(namespace(), PROMPT)
    made.flip(payload(pages[3]), 5)

    made.run("verify", "--repair", "--aside", str(tmp_path / "aside"), code=1)

    [kept] = (tmp_path / "aside").iterdir()
    good = record_of(namespace(), pages[3], created=0)
    assert kept.stem == pages[3].key.hex()
    assert len(kept.read_bytes()) == len(good)


def test_a_record_that_lost_its_end_is_bad(made: Made) -> None:
    [pages] = made.fill(namespace(), PROMPT)
    path, at = made.file_of(payload(pages[9]))
    os.truncate(path, at + 100)

    told = made.told("verify", code=1)

    # The first to open an lmdb store cuts torn tails off, and says so.
    assert told["bad"] + told["dropped"] == 1
    assert told["good"] == 10


def test_a_page_that_cannot_be_of_its_namespace_is_bad(made: Made) -> None:
    made.fill(namespace(), PROMPT)
    [page] = pages_of(namespace(), [1, 2, 3, 4])
    longer = bytearray(record_of(namespace(), page))
    longer += bytes(64)
    longer[24:40] = struct.pack("<QQ", LAYOUT.page_nbytes + 64, LAYOUT.page_nbytes + 64)
    longer[8:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(longer[16:]))
    made.put((page.key, bytes(longer)))

    [bad] = made.told("verify", code=1)["records"]

    assert bad["problem"] == "length: a page of 576 bytes in a layout of 512"


def test_records_of_another_format_are_no_damage(made: Made) -> None:
    made.fill(namespace(), PROMPT)
    [page] = pages_of(namespace(), [7] * 4)
    older = bytearray(record_of(namespace(), page))
    older[4] = 0
    made.put((page.key, bytes(older)))

    assert "1 record of older format: hicache store gc removes them" in made.run("verify")


def test_foreign_records_are_bad(made: Made) -> None:
    made.fill(namespace(), PROMPT)
    [page] = pages_of(namespace(), [8] * 4)
    made.put((page.key, b"somebody else's" * 20))

    [bad] = made.told("verify", code=1)["records"]

    assert bad["problem"].startswith("magic")
