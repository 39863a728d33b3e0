"""``hicache store export`` and ``import``: a namespace to another store, every record proved."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache.keys import PageKey
from hicache.tools import cli
from hicache.tools.store.bundle import Source, Writer
from tests.store_cli.made import KINDS, Made, description_of, namespace, pages_of, record_of

SHARED = list(range(8))
LONG = [*SHARED, *range(200, 240)]
SHORT = [*SHARED, *range(100, 108)]


@pytest.fixture
def target(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Made:
    """A store of the other kind."""
    [other] = [kind for kind in KINDS if kind != made.kind]
    return Made(other, tmp_path / "target", capsys)


def exported(made: Made, *argv: str) -> Path:
    path = made.path.parent / "warm.hicache"
    made.run("export", "-o", str(path), *argv)
    return path


def bring(target: Made, path: Path, code: int = 0) -> dict[str, Any]:
    argv = ["import", str(path), "--create", "--backend", target.kind]
    told: dict[str, Any] = target.told(*argv, code=code)
    return told


def test_a_namespace_goes_to_another_store_of_another_kind(made: Made, target: Made) -> None:
    made.fill(namespace(), LONG, SHORT)
    made.fill(namespace("tenant-7"), SHORT)
    path = exported(made, "--namespace", namespace().digest.hex()[:8])
    assert "14 pages, " in made.said

    told = bring(target, path)

    assert (told["stored"], told["namespace"]) == (14, namespace().digest.hex())
    pages = pages_of(namespace(), LONG) + pages_of(namespace(), SHORT)
    assert target.held() == {PageKey(namespace().digest), *(page.key for page in pages)}
    assert target.told("verify")["good"] == 15
    assert bring(target, path)["there already"] == 14


def test_it_goes_through_a_pipe_between_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, target = (Made(kind, tmp_path / kind, capsys) for kind in ("lmdb", "file"))
    made.fill(namespace(), LONG, SHORT)
    hicache = [sys.executable, "-m", "hicache.tools.cli", "store"]
    there = ["--path", str(target.path), "--create", "--backend", target.kind]

    with subprocess.Popen(
        [*hicache, "export", "--path", str(made.path)], stdout=subprocess.PIPE
    ) as writing:
        done = subprocess.run([*hicache, "import", *there], stdin=writing.stdout, timeout=60)

    assert (writing.returncode, done.returncode) == (0, 0)
    assert target.told("verify")["good"] == 15


def test_parents_come_before_their_children(made: Made) -> None:
    made.fill(namespace(), LONG, SHORT)
    order = {page.key: page.number for page in pages_of(namespace(), LONG)}

    source = Source(io.BytesIO(exported(made).read_bytes()))
    keys = [framed.key for framed in source]

    assert keys[0] == PageKey(namespace().digest)
    numbers = [order[key] for key in keys if key in order]
    assert numbers == sorted(numbers)
    assert source.end.num_expected == 15


def test_bad_and_unreachable_pages_are_not_exported(made: Made) -> None:
    [pages] = made.fill(namespace(), LONG)
    made.flip(record_of(namespace(), pages[11])[-100:], 5)
    made.delete(pages[8].key)
    path = made.path.parent / "warm.hicache"

    assert made.run("export", "-o", str(path)) == ""
    assert "8 pages" in made.said
    assert "left out: 3 unreachable" in made.said
    made.flip(record_of(namespace(), pages[2])[-100:], 5)
    made.run("export", "-o", str(path), code=1)

    assert "1 bad" in made.said


@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_a_file_that_is_damaged_anywhere_gives_only_what_is_whole(
    made: Made, target: Made, at: int
) -> None:
    made.fill(namespace(), LONG)
    path = exported(made)
    content = bytearray(path.read_bytes())
    content[1200 + (len(content) - 1200) * at // 10] ^= 0x10
    path.write_bytes(content)

    told = bring(target, path, code=1)

    assert told["stored"] == 11
    assert told["damaged"] == 1
    assert target.told("verify")["good"] == 12


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_file_that_is_cut_short_gives_what_is_there_and_says_so(
    made: Made, target: Made, share: float
) -> None:
    made.fill(namespace(), LONG)
    path = exported(made)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])

    told = bring(target, path, code=1)

    assert not told["is_whole"]
    assert "ends early" in target.said or told["is_whole"] is False
    pages = pages_of(namespace(), LONG)
    assert target.held() - {PageKey(namespace().digest)} == {
        page.key for page in pages[: told.get("stored", 0)]
    }


def test_pages_of_other_namespaces_and_formats_are_refused(target: Made, tmp_path: Path) -> None:
    ours, other = pages_of(namespace(), SHORT), namespace("tenant-7")
    older = bytearray(record_of(namespace(), ours[1]))
    older[4] = 0
    path = tmp_path / "made.hicache"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.add(*description_of(namespace()))
        writer.add(ours[0].key, record_of(namespace(), ours[0]))
        writer.add(ours[1].key, bytes(older))
        writer.add(ours[2].key, record_of(namespace(), ours[3]))  # under another's key
        foreign = pages_of(other, SHORT)[0]
        writer.add(foreign.key, record_of(other, foreign))
        writer.add(*description_of(other))
        writer.end()

    told = bring(target, path, code=1)

    assert (told["stored"], told["foreign"], told["damaged"]) == (1, 3, 1)
    assert target.held() == {PageKey(namespace().digest), ours[0].key}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no file of `hicache store export`"),
        (b"PK\x03\x04" * 10, "no file of `hicache store export`"),
        (b"HiCaBndl" + (9).to_bytes(4, "little") + bytes(4), "a file of version 9"),
        (b"HiCaBndl" + (1).to_bytes(4, "little") + bytes(4), "first record"),
    ],
)
def test_what_is_no_export_is_refused_before_a_store_is_made(
    target: Made, tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "what"
    path.write_bytes(content)

    target.run("import", str(path), "--create", code=2)

    assert why in target.said
    assert not target.path.exists()


def test_import_makes_a_store_only_when_asked(made: Made, target: Made) -> None:
    made.fill(namespace(), SHORT)
    path = exported(made)

    target.run("import", str(path), code=2)

    assert target.said == f"hicache: {target.path}: there is no store\n"
    assert not target.path.exists()


def test_export_asks_which_namespace_where_there_are_several(made: Made) -> None:
    made.fill(namespace(), SHORT)
    made.fill(namespace("tenant-7"), SHORT)

    made.run("export", code=2)

    assert "there are several namespaces, say which" in made.said


def test_a_target_that_cannot_be_written_is_one_line(made: Made) -> None:
    made.fill(namespace(), SHORT)

    made.run("export", "-o", "/nowhere/warm", code=2)

    assert made.said == "hicache: /nowhere/warm: No such file or directory\n"


def test_a_store_at_its_budget_says_that_import_made_it_evict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made("file", tmp_path / "store", capsys)
    made.fill(namespace(), *([one, *range(100)] for one in range(10)))
    path = exported(made)
    config = tmp_path / "small.toml"
    config.write_text(
        f'[cache.storage]\nbackend = "file"\npath = "{tmp_path / "small"}"\nsize = "100kB"\n'
    )

    assert cli.main(["store", "import", str(path), "--create", "--config", str(config)]) == 0

    assert "the store is at its budget of 100 kB" in capsys.readouterr().err
