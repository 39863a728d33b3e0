"""A store of each kind, for every test."""

from pathlib import Path

import pytest

from tests.store_cli.made import KINDS, Made


@pytest.fixture(params=KINDS)
def made(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Made:
    return Made(request.param, tmp_path / "store", capsys)
