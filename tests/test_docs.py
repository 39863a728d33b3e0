"""What the documents say is so: snippets run, links lead somewhere, nothing is left out.

The snippets of a document run in its own directory, in order, as a reader would paste them. One
that begins with ``# name.py`` or ``# name.toml`` is saved under that name. ``make`` and ``pip`` are
looked at, not run. ``hicache serve`` starts a server, with small tiers and on a free port; where a
snippet says port 8000, that server is meant.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest
from pydantic import BaseModel

from hicache.actions import Fact
from hicache.config import Config, load
from hicache.plugins import GROUP

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
WITH_SNIPPETS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("hicache", "backends", "engine", "tools")

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 120.0
SMALL = {
    "HICACHE_CACHE__DEVICE__SIZE": "100MB",
    "HICACHE_CACHE__HOST__SIZE": "200MB",
    "HICACHE_CACHE__STORAGE__SIZE": "300MB",
    "HICACHE_SERVER__PORT": "0",
}

Serve = Callable[[str], str]
"""Starts the server of a command line, or finds the one that runs; returns its address."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block of a document."""

    path: Path
    line: int
    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The name under which it is to be saved."""
        found = re.match(r"# ([\w-]+\.(?:py|toml))\n", self.text)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def snippets(path: Path) -> list[Snippet]:
    """Return the fenced blocks of a document."""
    text = path.read_text()
    return [
        Snippet(path, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def serve_command() -> str:
    """Return how the README starts the server."""
    texts = [snippet.text.strip() for snippet in snippets(ROOT / "README.md")]
    [command] = [text for text in texts if text.startswith("hicache serve")]
    return command


def prose(path: Path) -> str:
    """Return a document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def environment(folder: Path) -> dict[str, str]:
    """Return what a document's processes get: the commands, small tiers, a store of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HICACHE_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    store = {"HICACHE_CACHE__STORAGE__PATH": str(folder / "store")}
    return {**kept, **SMALL, **store, "PATH": path, "COLUMNS": "100"}


# ---------------------------------------------------------------- servers


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Servers by command line, that all documents share."""
    servers: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def start(command: str) -> str:
        if command not in servers:
            folder = tmp_path_factory.mktemp("serve")
            (folder / "configs").symlink_to(ROOT / "configs")
            process = subprocess.Popen(
                command.split(),
                cwd=folder,
                env=environment(folder),
                stderr=subprocess.PIPE,
                text=True,
            )
            servers[command] = process, ""
            servers[command] = process, _address(process)
        return servers[command][1]

    yield start
    for process, _ in servers.values():
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)


def _address(process: "subprocess.Popen[str]") -> str:
    """Return where a server says that it listens."""
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if found := re.match(r"listening on (http://\S+)", line):
            return found[1]
    raise AssertionError(f"the server ended and said: {''.join(said)}")


# ---------------------------------------------------------------- snippets


class Reader:
    """Somebody who reads a document from top to bottom and does what it says."""

    def __init__(self, folder: Path, serve: Serve) -> None:
        self.folder = folder
        self._serve = serve
        self._url = ""
        (folder / "configs").symlink_to(ROOT / "configs")

    def do(self, snippet: Snippet) -> None:
        """Run a snippet, or look whether it is right."""
        if snippet.file_name is not None:
            (self.folder / snippet.file_name).write_text(snippet.text)
        match snippet.language:
            case "python":
                if snippet.file_name is None:
                    self._run(snippet, [sys.executable, "-c", self._here(snippet.text)])
            case "sh":
                self._shell(snippet)
            case "toml":
                _check_toml(snippet)
            case "json":
                json.loads(snippet.text)
            case "text":
                pass  # to look at
            case other:
                pytest.fail(f"{snippet}: nobody knows how to run {other!r}")

    def _shell(self, snippet: Snippet) -> None:
        lines = snippet.text.splitlines()
        if lines[0].startswith("hicache serve"):
            [command] = lines
            self._url = self._serve(command)
        elif lines[0].startswith(("make ", "pip ")):
            for line in lines:
                _check_command(snippet, line)
        else:
            script = f"set -euo pipefail\n{self._here(snippet.text)}"
            self._run(snippet, ["bash", "-c", script])

    def _here(self, text: str) -> str:
        if URL in text and not self._url:
            self._url = self._serve(serve_command())
        return text.replace(URL, self._url)

    def _run(self, snippet: Snippet, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment(self.folder),
            input="/quit\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        # A benchmark that misses a bar says so with 1: a busy machine is no fault of the document.
        allowed = (0, 1) if snippet.text.startswith("hicache bench") else (0,)
        said = f"{snippet}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode in allowed, said
        assert '"error"' not in done.stdout, said


def _check_toml(snippet: Snippet) -> None:
    """Load settings; of a pyproject.toml, look at the entry points."""
    tables = tomllib.loads(snippet.text)
    if "project" in tables:
        [(group, names)] = tables["project"]["entry-points"].items()
        assert group == GROUP
        assert all(re.fullmatch(r"[\w.]+:\w+", target) for target in names.values())
        return
    flat = dict(_flat(tables))
    assert flat, f"{snippet}: it sets nothing"
    load(None, {}, flat)


def _flat(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tables.items():
        if isinstance(value, dict) and name != "options":
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check_command(snippet: Snippet, line: str) -> None:
    """Look whether ``make`` knows its target, and whether the extras that are installed exist."""
    if line.startswith("make "):
        done = subprocess.run(
            [*line.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{snippet}: {done.stderr}"
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[([\w,]+)\]", line):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), f"{snippet}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", WITH_SNIPPETS, ids=lambda path: path.name)
def test_every_snippet_runs(path: Path, tmp_path: Path, serve: Serve) -> None:
    reader = Reader(tmp_path, serve)

    for snippet in snippets(path):
        reader.do(snippet)


@pytest.mark.slow
def test_the_operators_page_lists_every_metric_there_is(serve: Serve) -> None:
    documented = set(re.findall(r"`(hicache_\w+)", (ROOT / "docs/operations.md").read_text()))

    page = httpx.get(f"{serve(serve_command())}/metrics").text

    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert names
    assert names - documented == set()


def test_the_operators_page_lists_no_metric_that_there_is_not() -> None:
    source = "".join(path.read_text() for path in (ROOT / "engine").glob("*metric*.py"))
    kinds = get_args(get_type_hints(Fact)["kind"])
    known = set(re.findall(r'"(?:hicache_)?(\w+)"', source)) | {f"{kind}_pages" for kind in kinds}

    documented = set(re.findall(r"`hicache_(\w+)", (ROOT / "docs/operations.md").read_text()))

    assert {name for name in documented if name.removesuffix("_total") not in known} == set()


# ---------------------------------------------------------------- names


def test_every_benchmark_of_the_readme_is_a_command() -> None:
    names = set(re.findall(r"`hicache bench (\w+)`", (ROOT / "README.md").read_text()))
    source = (ROOT / "tools/cli.py").read_text()

    assert names == set(re.findall(r'@bench\.command\("(\w+)"\)', source))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_setting_that_is_named_exists(path: Path) -> None:
    named = re.findall(r"`((?:cache|engine|server)\.[a-z_.]*[a-z_])\b", prose(path))

    assert [name for name in named if not is_setting(name)] == []


def is_setting(dotted: str) -> bool:
    """Whether there is a setting, or a table of them, of that name."""
    kind: Any = Config
    for name in dotted.split("."):
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return False
        if name not in kind.model_fields:
            return False
        kind = kind.model_fields[name].annotation
    return True


# ---------------------------------------------------------------- links and the map


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(path))

    dead = [link for link in links if "://" not in link and not leads_somewhere(path, link)]

    assert dead == []


def leads_somewhere(path: Path, link: str) -> bool:
    """Whether a link of a document names a file, and a heading that is in it."""
    name, _, anchor = link.partition("#")
    target = path if not name else path.parent / name
    if not target.exists():
        return False
    return not anchor or anchor in {_slug(line) for line in target.read_text().splitlines()}


def _slug(heading: str) -> str:
    """Return the anchor of a heading, as forges make it."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


def test_the_code_map_names_every_module_and_no_other() -> None:
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    section = architecture.split("\n## Code map\n")[1].split("\n## ")[0]
    mapped = re.findall(r"^\| `([\w/]+(?:\.py)?)` \|", section, flags=re.MULTILINE)

    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    expected = {_map_name(path.relative_to(ROOT)) for path in files}

    assert sorted(mapped) == sorted(expected)


def _map_name(path: Path) -> str:
    """Return how the map calls a module: a package by its folder."""
    return f"{path.parent}/" if path.name == "__init__.py" else str(path)
