"""``hicache backends check``: what it prints, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.tools import cli

WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = sys.modules["hypothesis"] = None
from hicache.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""
WRONG = "tests.wrong_backends"


def test_a_backend_that_keeps_the_contract_ends_with_0_and_its_one_store_is_emptied(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "checked.json"
    stores = tmp_path / "stores"

    files = ("--path", str(stores), "--json", str(written))

    code = cli.main(["backends", "check", f"{WRONG}:OneForAll", *files])

    said = capsys.readouterr().out
    assert code == 0, said
    assert "pass  values come back in the order asked\n" in said
    assert " 0 failed, 0 skipped" in said.splitlines()[-1]
    checks = json.loads(written.read_text())["checks"]
    assert {check["status"] for check in checks} == {"passed"}
    assert list(stores.iterdir()) == []


def test_what_is_wrong_is_told_in_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "checked.json"

    assert cli.main(["backends", "check", f"{WRONG}:RaisesOnAbsence", "--json", str(written)]) == 1

    said = capsys.readouterr().out
    assert (
        "FAIL  a missing key is none and no error\n"
        "        promise:  Absence is no failure: get returns None and contains returns False.\n"
        "        expected: no exception\n"
        "        happened: KeyError: "
    ) in said
    assert "(wrong_backends.py, line " in said
    assert "Traceback" not in said
    failed = [one for one in json.loads(written.read_text())["checks"] if one["status"] == "failed"]
    assert all(check["expected"] and check["happened"] for check in failed)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["mongo"], "hicache: no storage backend 'mongo'"),
        (["memory", "--option", "typo=1"], "hicache: storage.options.typo: no such option"),
        (["memory", "--option", "typo"], "hicache: command line: --option typo: write --option"),
        (["memory", "--path", "/proc/none"], "hicache: /proc/none: "),
        ([f"{WRONG}:CannotOpen"], "hicache: no server there"),
        ([f"{WRONG}:RaisesInOpen"], "hicache: the backend cannot be opened: ZeroDivisionError"),
        ([f"{WRONG}:InUse"], "hicache: the store holds 1 records: the checks need one that is"),
    ],
)
def test_what_cannot_be_checked_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    assert cli.main(["backends", "check", *argv]) == 2

    printed = capsys.readouterr()
    assert printed.err.startswith(line)
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.slow
def test_a_backend_that_hangs_fails_its_check_and_the_command_ends() -> None:
    script = (
        "from hicache.tools import backend_check;"
        f"backend_check.run('{WRONG}:HangsForEver', timeout_s=0.3)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 1
    assert "happened: it had not ended after 0.3 s" in done.stdout
    assert "never returned: not waiting for it" in done.stderr


@pytest.mark.slow
def test_neither_pytest_nor_hypothesis_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTEST, "backends", "check", "memory"],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "skip  records outlive the process: the backend says that" in done.stdout
