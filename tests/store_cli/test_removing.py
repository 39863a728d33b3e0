"""``hicache store gc`` and ``rm``: nothing goes before ``--yes``, and then only what was named."""

import io
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from hicache.keys import PageKey, PageRef
from hicache.namespace import Namespace
from tests.disk_child import BACKENDS
from tests.disks import FakeClock
from tests.store_cli.made import (
    BUDGET_NBYTES,
    Made,
    description_of,
    namespace,
    pages_of,
    record_of,
)

SHARED = list(range(8))
LONG = [*SHARED, *range(200, 240)]
SHORT = [*SHARED, *range(100, 108)]
DAY_S = 86400.0


def put_old(made: Made, space: Namespace, pages: list[PageRef]) -> None:
    """Put pages as they were put and used yesterday."""

    async def work() -> None:
        clock = FakeClock()
        clock.now = time.time() - DAY_S
        async with BACKENDS[made.kind](made.path, BUDGET_NBYTES, clock=clock) as backend:
            items = [(page.key, [record_of(space, page, clock.now)]) for page in pages]
            key, data = description_of(space, clock.now)
            await backend.put([(key, [data]), *items])

    made.on(work())


# ---------------------------------------------------------------- gc


def test_gc_of_a_store_where_all_is_reachable_finds_nothing(made: Made) -> None:
    put_old(made, namespace(), pages_of(namespace(), LONG))

    assert made.run("gc", "--yes") == "nothing to remove\n"


def test_gc_removes_pages_whose_ancestors_are_gone_and_all_after_them(made: Made) -> None:
    pages = pages_of(namespace(), LONG)
    put_old(made, namespace(), pages)
    made.delete(pages[4].key)

    assert "7 records" in made.run("gc")
    assert len(made.held()) == 12  # nothing has gone yet
    told = made.told("gc", "--yes")

    assert told["groups"][0] | {"nbytes": 0} == {"what": "unreachable", "records": 7, "nbytes": 0}
    assert made.held() == {PageKey(namespace().digest), *(page.key for page in pages[:4])}


def test_gc_leaves_what_was_used_a_moment_ago(made: Made) -> None:
    [pages] = made.fill(namespace(), LONG)
    made.delete(pages[4].key)

    assert made.run("gc", "--yes") == "nothing to remove\n"
    assert made.told("gc", "--unused-for", "0")["groups"][0]["records"] == 7


def test_gc_removes_older_formats_and_descriptions_without_pages(made: Made) -> None:
    empty = namespace("gone")
    put_old(made, empty, [])
    made.fill(namespace(), SHORT)
    older = bytearray(record_of(namespace(), pages_of(namespace(), [7] * 4)[0]))
    older[4] = 0
    newer = bytearray(older)
    newer[4] = 9
    made.put((pages_of(namespace(), [7] * 4)[0].key, bytes(older)))
    made.put((pages_of(namespace(), [8] * 4)[0].key, bytes(newer)))

    told = made.told("gc", "--yes")

    assert [(one["what"], one["records"]) for one in told["groups"]] == [
        ("older", 1),
        ("empty", 1),
    ]
    assert made.told("stat")["others"] == {"newer format": 1}
    assert PageKey(empty.digest) not in made.held()


# ---------------------------------------------------------------- rm


def test_rm_of_a_namespace_takes_its_pages_and_no_others(made: Made) -> None:
    made.fill(namespace(), LONG)
    [others] = made.fill(namespace("tenant-7"), SHORT)

    short = namespace().digest.hex()[:8]
    assert "12 records" in made.run("rm", "--namespace", short)
    assert len(made.held()) == 18
    assert "12 records" in made.run("rm", "--namespace", short, "--yes")

    descriptions = {PageKey(one.digest) for one in (namespace(), namespace("tenant-7"))}
    assert made.held() == descriptions | {page.key for page in others}


def test_rm_of_a_tenant_takes_all_its_namespaces(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.fill(namespace(), SHORT)
    made.fill(namespace("tenant-7"), SHORT)
    made.fill(namespace("tenant-7", weights=b"other"), SHORT)
    monkeypatch.setattr("sys.stdin", io.StringIO("tenant-7\n"))

    told = made.told("rm", "--tenant", "-", "--yes")

    assert sum(one["records"] for one in told["groups"]) == 8
    assert made.told("stat")["namespaces"][0]["num_pages"] == 4


def test_rm_of_a_prefix_takes_what_begins_with_it_and_leaves_what_is_shared(made: Made) -> None:
    [long, short, other] = made.fill(namespace(), LONG, SHORT, [5] * 8)

    made.run("rm", "--tokens", ",".join(str(one) for one in LONG[:9]), "--yes")

    assert made.held() - {PageKey(namespace().digest)} == {
        page.key for page in (*long[:2], *short, *other)
    }
    made.run("rm", "--tokens", "0,1", "--yes")
    assert made.held() - {PageKey(namespace().digest)} == {page.key for page in other}


def test_rm_of_a_text_does_not_ask_how_it_was_cut_into_tokens(made: Made, tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"be": 0, "brief": 1, "now": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    [one, two, other] = made.fill(namespace(), [0, 1] * 4, [0, 1, 0, 1, 2, 2, 2, 2], [2] * 8)
    text = ["--tokenizer", str(tmp_path), "--prefix"]

    made.run("rm", *text, "be brief be brief n", "--yes")
    assert made.held() - {PageKey(namespace().digest)} == {page.key for page in (*one, *other)}
    made.run("rm", *text, "be br", "--yes")

    assert two[0] == one[0]
    assert made.held() - {PageKey(namespace().digest)} == {page.key for page in other}
