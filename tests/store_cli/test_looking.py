"""``hicache store stat`` and ``ls``: what is there, in words; and looking makes no store."""

import os
import time
from hashlib import sha256
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from hicache.keys import PageKey
from hicache.tools import cli
from tests.disk_child import BACKENDS
from tests.disks import FakeClock
from tests.store_cli.made import BUDGET_NBYTES, Made, namespace, pages_of, record_of

SALT = sha256(b"tenant-7").digest()
SHARED = list(range(8))
LONG = [*SHARED, *range(200, 240)]
SHORT = [*SHARED, *range(100, 108)]


def test_stat_names_namespaces_in_words_with_pages_bytes_and_ages(made: Made) -> None:
    made.fill(namespace(), LONG, SHORT)
    made.fill(namespace("tenant-7"), SHORT)

    printed = made.run("stat")
    assert made.said == ""
    told = made.told("stat")

    assert f"{made.kind} in {made.path}: 18 pages" in printed
    assert "llama, 2 layers x 1 KV x 8, float32" in printed
    assert "pages of 4 tokens, weights 3fa93fa9" in printed
    assert f"tenant {SALT.hex()[:8]}" in printed
    first, second = told["namespaces"]
    assert (first["num_pages"], first["num_first"], first["longest_pages"]) == (14, 1, 12)
    assert first["nbytes"] == 14 * len(record_of(namespace(), pages_of(namespace(), SHORT)[0]))
    assert first["namespace"] == namespace().digest.hex()
    assert second["tenant"] == SALT.hex()
    assert abs(first["first_created"] - time.time()) < 60


async def _touch(made: Made, *keys: PageKey) -> None:
    clock = FakeClock()
    clock.now = time.time() + 600
    async with BACKENDS[made.kind](made.path, BUDGET_NBYTES, clock=clock) as backend:
        await backend.touch(keys)


def test_stat_says_how_many_pages_were_used_again(made: Made) -> None:
    [pages] = made.fill(namespace(), SHORT)
    made.on(_touch(made, pages[0].key))

    [share] = made.told("stat")["namespaces"]

    assert (share["num_reused"], share["num_pages"]) == (1, 4)
    assert "25%" in made.run("stat")


def test_stat_counts_what_is_no_page_of_this_format(made: Made) -> None:
    [pages] = made.fill(namespace(), SHORT)
    older = bytearray(record_of(namespace(), pages_of(namespace(), [7] * 4)[0]))
    older[4] = 0
    made.put((pages_of(namespace(), [7] * 4)[0].key, bytes(older)))
    made.put((pages_of(namespace(), [8] * 4)[0].key, b"somebody else's" * 20))
    made.flip(record_of(namespace(), pages[1])[200:], -220)

    assert made.told("stat")["others"] == {"older format": 1, "foreign": 1, "unreadable": 1}


def test_stat_of_a_namespace_without_its_description_still_counts_it(made: Made) -> None:
    made.fill(namespace(), SHORT)
    made.delete(PageKey(namespace().digest))

    assert "(no description)" in made.run("stat")


def test_ls_shows_the_tree_largest_first_within_its_bounds(made: Made) -> None:
    made.fill(namespace(), LONG, SHORT, [5] * 8)

    printed = made.run("ls")
    [tree] = made.told("ls", "--width", "1")

    lines = [line.split() for line in printed.splitlines() if "0 s" in line or " s " in line]
    assert [line[0] for line in lines] == ["14", "10", "2", "2"]
    assert printed.index("├── 200 201 202 203") < printed.index("└── 100 101 102 103")
    assert tree["hidden"] == 1
    [branch] = tree["branches"]
    assert (branch["pages"], branch["own_pages"], branch["hidden"]) == (14, 2, 1)
    assert branch["text"] == "0 1 2 3"
    assert "… 2 branches" in made.run("ls", "--depth", "1")


def test_ls_of_a_prefix_shows_what_begins_with_it(made: Made) -> None:
    made.fill(namespace(), LONG, SHORT, [5] * 8)

    [tree] = made.told("ls", "--tokens", ",".join(str(one) for one in LONG[:9]))

    assert [branch["pages"] for branch in tree["branches"]] == [10]
    made.run("ls", "--tokens", "77", code=2)
    assert made.said == "hicache: nothing in this store begins with that prefix\n"


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A tokenizer of three words."""
    made = Tokenizer(WordLevel({"be": 0, "brief": 1, "please": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_ls_shows_text_where_there_is_a_tokenizer(made: Made, words: str) -> None:
    made.fill(namespace(), [0, 1, 2, 0], [2, 2, 2, 2])

    printed = made.run("ls", "--tokenizer", words)
    begun = made.told("ls", "--tokenizer", words, "--prefix", "be brief")

    assert "be brief please be" in printed
    assert [branch["text"] for branch in begun[0]["branches"]] == ["be brief please be"]


@pytest.mark.parametrize("command", ["stat", "verify", "ls", "gc", "export", "rm"])
def test_looking_makes_no_store(
    command: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--namespace", "abcd"] if command == "rm" else []
    empty = made.path.parent / "empty"
    empty.mkdir()

    for path in (made.path, empty):
        for backend in ([], ["--backend", made.kind]):
            assert cli.main(["store", command, "--path", str(path), *backend, *more]) == 2
            assert capsys.readouterr().err == f"hicache: {path}: there is no store\n"

    assert not made.path.exists()
    assert os.listdir(empty) == []


def test_a_store_of_another_kind_or_format_is_left_alone(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    made.fill(namespace(), SHORT)
    other = "file" if made.kind == "lmdb" else "lmdb"

    assert cli.main(["store", "stat", "--path", str(made.path), "--backend", other]) == 2
    assert "holds a store of kind" in capsys.readouterr().err

    (made.path / "hicache-store").write_text(f"hicache {made.kind} 0\n")
    made.run("stat", code=2)
    assert "another format" in made.said
    (made.path / "hicache-store").write_text(f"hicache {made.kind} 1\n")
    assert len(made.held()) == 5


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["ls", "--namespace", "0000"], "namespace 0000: there is none in this store"),
        (["ls", "--namespace", "0"], "namespace 0: give 4 or more digits"),
        (["rm", "--tenant", "nobody"], "tenant: there is no namespace with this salt"),
        (["rm"], "say what: --namespace, --tenant, --prefix or --tokens"),
        (["rm", "--prefix", "be"], "--prefix: say --tokenizer PATH, or give --tokens"),
        (["rm", "--tokens", "x"], "--tokens x: write ids, as 1,2,3"),
        (["ls", "--tokens", "1", "--prefix", "be"], "say --prefix or --tokens, not both"),
        (["ls", "--prefix", ""], "--prefix: it is empty"),
        (["ls", "--tokenizer", "/nowhere"], "/nowhere: No such file or directory"),
        (["verify", "--aside", "x"], "--aside: only with --repair"),
        (["stat", "--backend", "none"], "cache.storage.backend is none: there is no store"),
        (["stat", "--backend", "nil"], "no storage backend 'nil'"),
    ],
)
def test_what_cannot_be_done_is_one_line(made: Made, argv: list[str], why: str) -> None:
    made.fill(namespace(), SHORT)

    made.run(*argv, code=2)

    assert why in made.said
    assert made.said.count("\n") == 1


def test_the_settings_of_a_server_name_its_store(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made.fill(namespace(), SHORT)
    config = tmp_path / "my.toml"
    config.write_text(f'[cache.storage]\nbackend = "{made.kind}"\npath = "{made.path}"\n')

    assert cli.main(["store", "stat", "--config", str(config)]) == 0

    assert "4 pages" in capsys.readouterr().out
