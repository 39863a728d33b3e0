"""``hicache backends list``: which storage backends are installed, and whether they can be used."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from hicache.storage import CONTRACT_VERSION, StorageBackend
from hicache.tools.report import open_console, write_json

GROUP = "hicache.backends"
"""The entry point group by which a backend is found, ours like any other."""


@dataclass(frozen=True, slots=True)
class Found:
    """One installed backend."""

    name: str
    target: str
    package: str
    """The distribution that brings it, with its version."""
    problem: str | None
    """Why it cannot be used, in one line; ``None`` if it can."""


def find() -> list[Found]:
    """Return the installed backends by name. Imports each one."""
    return [
        Found(point.name, point.value, _package(point), _problem(point))
        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)
    ]


def run(json_path: Path | None = None) -> int:
    """Print the table, write the file if there is to be one; 1 if a backend cannot be used."""
    found = find()
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("backend", "class", "package", ""):
        table.add_column(title)
    for backend in found:
        table.add_row(
            backend.name, backend.target, backend.package, escape(backend.problem or "ok")
        )
    open_console().print(table)
    if json_path is not None:
        write_json(json_path, {"backends": [as_json(backend) for backend in found]})
    return 1 if any(backend.problem for backend in found) else 0


def as_json(backend: Found) -> dict[str, str | None]:
    """Return what is written to a file of one backend."""
    return {
        "name": backend.name,
        "class": backend.target,
        "package": backend.package,
        "problem": backend.problem,
    }


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else ""


def _problem(point: EntryPoint) -> str | None:
    try:
        backend = point.load()
    except (ImportError, AttributeError, OSError) as error:
        return " ".join(str(error).split())
    if not (isinstance(backend, type) and issubclass(backend, StorageBackend)):
        return "is no StorageBackend"
    if backend.contract_version != CONTRACT_VERSION:
        return f"is for contract {backend.contract_version}, this is {CONTRACT_VERSION}"
    return None
