"""The conformance kit: each wrong backend is caught by the check whose promise it breaks."""

from pathlib import Path

import pytest

from hicache.testing.checks import CHECKS
from hicache.testing.running import Make, Outcome, run_checks
from tests.right_backend import CAUGHT_BY, Right
from tests.wrong_backends import WRONG


def outcomes(kind: type[Right], folder: Path, name: str) -> list[Outcome]:
    """Run the check of that name."""
    checks = [check for check in CHECKS if check.name == name]
    make: Make = kind
    return list(run_checks(kind, make, folder, checks=checks))


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: str(kind.__name__))
def test_a_wrong_backend_is_caught_by_name(kind: type[Right], tmp_path: Path) -> None:
    [went] = outcomes(kind, tmp_path, CAUGHT_BY[kind.__name__])

    assert went.status == "failed", f"{kind.__name__} was not caught"
    assert went.expected
    assert went.happened
    assert "\n" not in went.expected + went.happened


def test_every_check_says_what_it_promises_and_catches_something() -> None:
    assert all(check.promise.endswith(".") for check in CHECKS)
    assert {check.name for check in CHECKS} == set(CAUGHT_BY.values())
