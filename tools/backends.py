"""``hicache backends list``: which storage backends are installed, and whether they can be used."""

from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from hicache import plugins
from hicache.errors import ConfigError
from hicache.tools.report import open_console, write_json


@dataclass(frozen=True, slots=True)
class Found:
    """One installed backend, and how it fares when it is imported."""

    backend: plugins.InstalledBackend
    problem: str | None
    """Why it cannot be used, in one line; ``None`` if it can."""


def find() -> list[Found]:
    """Return the installed backends by name. Imports each one."""
    return [Found(backend, _problem(backend.name)) for backend in plugins.installed()]


def run(json_path: Path | None = None) -> int:
    """Print the table, write the file if there is to be one; 1 if a backend cannot be used."""
    found = find()
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("backend", "class", "package", ""):
        table.add_column(title)
    for row in found:
        backend = row.backend
        table.add_row(
            backend.name, backend.target, backend.distribution, escape(row.problem or "ok")
        )
    open_console().print(table)
    if json_path is not None:
        write_json(json_path, {"backends": [as_json(row) for row in found]})
    return 1 if any(row.problem for row in found) else 0


def as_json(row: Found) -> dict[str, str | None]:
    """Return what is written to a file of one backend."""
    backend = row.backend
    return {
        "name": backend.name,
        "class": backend.target,
        "package": backend.distribution,
        "problem": row.problem,
    }


def _problem(name: str) -> str | None:
    try:
        plugins.backend_class(name)
    except ConfigError as error:
        return str(error)
    return None
