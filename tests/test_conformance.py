"""The conformance kit: right backends pass, and each wrong one is caught by the check it breaks."""

from pathlib import Path

import pytest

from hicache.testing.checks import CHECKS
from hicache.testing.running import Make, Outcome, run_checks
from tests.wrong_backends import CAUGHT_BY, WRONG, Right


def outcomes(kind: type[Right], folder: Path, names: set[str] | None = None) -> list[Outcome]:
    """Run checks, all or those that are named."""
    checks = [check for check in CHECKS if names is None or check.name in names]
    make: Make = kind
    return list(run_checks(kind, make, folder, checks=checks))


def test_a_right_backend_passes_every_check(tmp_path: Path) -> None:
    went = outcomes(Right, tmp_path)

    assert [(one.check.name, one.happened) for one in went if one.status != "passed"] == []
    assert len(went) == len(CHECKS)


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: str(kind.__name__))
def test_a_wrong_backend_is_caught_by_name(kind: type[Right], tmp_path: Path) -> None:
    [went] = outcomes(kind, tmp_path, {CAUGHT_BY[kind.__name__]})

    assert went.status == "failed", f"{kind.__name__} was not caught"
    assert went.expected
    assert went.happened
    assert "\n" not in went.expected + went.happened


def test_every_check_says_what_it_promises_and_catches_something() -> None:
    assert all(check.promise.endswith(".") for check in CHECKS)
    assert {check.name for check in CHECKS} == set(CAUGHT_BY.values())
