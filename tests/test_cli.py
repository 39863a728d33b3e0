"""The command line: its exit codes, and the one line that a mistake gets."""

import json
import sys
from pathlib import Path

import pytest

import hicache
from hicache.tools import backends, cli


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line on stderr with which a command could not run."""
    assert cli.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.rstrip()


@pytest.mark.parametrize("argv", [["--help"], ["bench", "--help"], ["serve", "--help"]])
def test_help_goes_to_stdout_and_is_no_failure(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert cli.main(argv) == 0

    printed = capsys.readouterr()
    assert "Usage: hicache" in printed.out
    assert printed.err == ""


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0

    assert capsys.readouterr().out == f"{hicache.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["bench"], ["backends"], ["trace"]])
def test_a_command_without_its_command_shows_help_and_could_not_run(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert cli.main(argv) == 2

    printed = capsys.readouterr()
    assert "Commands" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["sing"], "hicache: No such command 'sing'."),
        (["bench", "sing"], "hicache: No such command 'sing'."),
        (["serve", "--prt", "1"], "hicache: No such option: --prt"),
        (["serve", "--port", "x"], "hicache: Invalid value for '--port'"),
        (["chat", "--max-tokens", "0"], "hicache: Invalid value for '--max-tokens'"),
        (["bench", "storage", "--dir"], "hicache: Option '--dir' requires an argument"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    assert refusal(capsys, *argv).startswith(line)


def test_a_wrong_setting_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent = tmp_path / "absent.toml"

    assert refusal(capsys, "serve", "--config", str(absent)) == (
        f"hicache: {absent}: No such file or directory"
    )
    assert refusal(capsys, "serve", "--set", "cache.host.sise=8GB") == (
        "hicache: command line: cache.host.sise: no such setting"
    )
    assert refusal(capsys, "serve", "--set", "cache.host.size") == (
        "hicache: command line: --set cache.host.size: write --set NAME=VALUE"
    )


def test_a_setting_that_has_a_flag_of_its_own_can_be_set_either_way(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    port = ("--set", "server.port=99999")
    expected = "hicache: command line: server.port: "

    assert refusal(capsys, "serve", *port).startswith(expected)
    assert refusal(capsys, "serve", *port, "--port", "88888").startswith(expected)


def test_an_interrupt_is_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> list[backends.Found]:
        raise KeyboardInterrupt

    monkeypatch.setattr(backends, "find", interrupted)

    assert cli.main(["backends", "list"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_missing_engine_is_told_with_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_torch() -> list[backends.Found]:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(backends, "find", without_torch)

    assert refusal(capsys, "backends", "list") == (
        "hicache: torch is missing: pip install 'hicache[engine]'"
    )


# ---------------------------------------------------------------- backends list


def install_plugin(folder: Path, module: str) -> None:
    """Lay down what pip would: a module and the entry point ``third``."""
    info = folder / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hicache.backends]\nthird = third_party:Backend\n")
    (folder / "third_party.py").write_text(module)


def test_our_backends_are_found_and_can_be_used() -> None:
    problems = {found.backend.name: found.problem for found in backends.find()}

    assert problems == {"file": None, "lmdb": None, "memory": None}


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("import a_client_that_is_not_installed\n", "a_client_that_is_not_installed"),
        ("", "module 'third_party' has no attribute 'Backend'"),
        ("class Backend: ...\n", "is no StorageBackend"),
        (
            "from hicache.backends.memory import MemoryBackend\n"
            "class Backend(MemoryBackend):\n    contract_version = 99\n",
            "keeps version 99 of the storage contract",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_listed_with_the_reason(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: str,
    problem: str,
) -> None:
    install_plugin(tmp_path, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "third_party", raising=False)
    written = tmp_path / "found.json"

    assert cli.main(["backends", "list", "--json", str(written)]) == 1

    listed = {row["name"]: row for row in json.loads(written.read_text())["backends"]}
    assert listed["third"]["package"] == "third-party 1.0"
    assert problem in listed["third"]["problem"]
    assert "third_party:Backend" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["backends", "list", "--json", str(tmp_path)]) == 2

    assert capsys.readouterr().err == f"hicache: {tmp_path}: Is a directory\n"
