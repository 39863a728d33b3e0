"""All commands on a store that another process writes, reads and evicts meanwhile."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.store_cli.beside import SPACE
from tests.store_cli.made import Made, namespace

BUDGETS = {"file": 200_000, "lmdb": 5 << 20}
TRIES = 10
GONE = (
    "hicache: nothing in this store begins with that prefix\n",
    "hicache: tenant: there is no namespace with this salt in this store\n",
)
ROUNDS, SOAK_ROUNDS = 1, 200


@contextmanager
def beside(made: Made) -> "Iterator[subprocess.Popen[str]]":
    argv = [made.kind, str(made.path), str(BUDGETS[made.kind])]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.store_cli.beside", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def remove(made: Made, number: int, *argv: str) -> None:
    """Put pages and remove them again: a few times, if the other process has them evicted first."""
    for _ in range(TRIES):
        made.fill(namespace("other"), [number + 1] * 40)
        code, said = made.tried(*argv)
        if code == 0:
            return
        assert code == 2
        assert said in GONE
    raise AssertionError("they were always gone")


def use_every_command(made: Made, warm: Path, number: int) -> None:
    short = SPACE.digest.hex()[:8]
    assert made.told("stat")["records"] > 0
    told = made.told("verify")
    assert (told["bad"], told["dropped"]) == (0, 0)
    assert told["good"] > 0
    assert made.told("ls", "--namespace", short)[0]["branches"]
    made.run("export", "--namespace", short, "-o", str(warm))
    assert made.told("import", str(warm))["namespace"] == SPACE.digest.hex()
    made.run("gc", "--unused-for", "0", "--yes")
    remove(made, number, "rm", "--tokens", f"{number + 1}", "--tenant", "other", "--yes")
    remove(made, number, "rm", "--tenant", "other", "--yes")
    assert made.told("verify", "--repair")["bad"] == 0


@pytest.mark.parametrize(
    "rounds", [ROUNDS, pytest.param(SOAK_ROUNDS, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_every_command_works_while_a_store_is_in_use(
    made: Made, tmp_path: Path, rounds: int, is_full: bool
) -> None:
    rounds = rounds if is_full or rounds == ROUNDS else 3
    with beside(made) as process:
        for number in range(rounds):
            use_every_command(made, tmp_path / "warm", number)
        printed, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert "hit" in printed
