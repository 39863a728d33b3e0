"""Four folders, one import package: the table that installs it and the links that say the same."""

import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hicache

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def import_name(init: Path) -> str:
    top, *rest = init.parent.relative_to(ROOT).parts
    return ".".join([top, *rest] if top == "hicache" else ["hicache", top, *rest])


def test_every_package_is_listed() -> None:
    found = {
        import_name(init)
        for top in set(SETUPTOOLS["package-dir"].values())
        for init in (ROOT / top).rglob("__init__.py")
    }

    assert found == set(SETUPTOOLS["packages"])


def test_links_match_the_mapping() -> None:
    for name, folder in SETUPTOOLS["package-dir"].items():
        assert ROOT.joinpath(*name.split(".")).resolve() == ROOT / folder


def test_the_version_is_the_same_everywhere() -> None:
    assert hicache.__version__ == PYPROJECT["project"]["version"] == version("hicache")


def test_every_dependency_is_pinned_within_its_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [PYPROJECT["project"]["dependencies"]]
    wanted += [extras[name] for name in ("engine", "demo", "crypto", "test", "lint")]

    for requirement in (Requirement(text) for group in wanted for text in group):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
