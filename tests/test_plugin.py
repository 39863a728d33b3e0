"""A storage backend of somebody else's: built, installed, found by its name, and checked."""

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "tests" / "plugin_sqlite"


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the plug-in installed; what HiCache needs is borrowed from ours."""
    folder = tmp_path_factory.mktemp("plugin")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "sqlite_backend.py"):
        (source / name).write_text((PLUGIN / name).read_text())
    offline = ("--quiet", "--no-index", "--no-deps")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, source)
    [wheel] = folder.glob("*.whl")

    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", *offline, wheel)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join([str(ROOT), *site.getsitepackages()]))
    return python


@pytest.mark.slow
def test_a_plugin_is_installed_found_by_its_name_and_keeps_the_contract(
    python: Path, tmp_path: Path
) -> None:
    written = tmp_path / "checked.json"
    check = (python, "-m", "hicache.tools.cli", "backends", "check", "sqlite")

    said = run(*check, "--option", "synchronous=NORMAL", "--json", written)

    assert "0 failed, 0 skipped" in said
    assert {check["status"] for check in json.loads(written.read_text())["checks"]} == {"passed"}


def test_the_page_for_authors_shows_the_plugin_as_it_is() -> None:
    page = (ROOT / "docs" / "backends.md").read_text()

    for name in ("pyproject.toml", "sqlite_backend.py"):
        assert f"\n{(PLUGIN / name).read_text()}```\n" in page, f"docs/backends.md: {name}"
