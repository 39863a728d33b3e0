"""How results look: sizes and times as people read them, tables, JSON, a progress bar."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hicache.tools.report import open_console

_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_SPANS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def size(nbytes: float) -> str:
    """Return a number of bytes with three digits that matter: ``46.1 MB``."""
    for unit, factor in _UNITS:
        if nbytes >= 0.9995 * factor:
            amount = nbytes / factor
            return f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f} {unit}"
    return f"{nbytes:.0f} B"


def span(seconds: float | None) -> str:
    """Return a length of time in one unit: ``3 d``, ``12 min``; a dash where it is not known."""
    if seconds is None:
        return "-"
    for unit, factor in _SPANS:
        if seconds >= factor:
            return f"{seconds / factor:.0f} {unit}"
    return "0 s"


def count(number: int, noun: str) -> str:
    """Return ``1 page`` or ``1,234 pages``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def table(*columns: str) -> Table:
    """Return a table; a column whose name begins with ``>`` is aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.removeprefix(">"), justify="right" if right else "left", no_wrap=right
        )
    return made


def show(*parts: Table | str) -> None:
    """Print results."""
    console = open_console()
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(part)


def show_json(content: object) -> None:
    """Print a result for machines."""
    print(json.dumps(content, indent=2))


def say(text: str) -> None:
    """Print a message, beside the results."""
    print(f"hicache: {text}", file=sys.stderr)


def private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, as all of a store."""
    return os.open(path, flags, 0o600)


class Bar:
    """A progress bar on stderr; nothing where that is no terminal."""

    def __init__(self, progress: Progress, title: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total)

    def add(self, amount: int) -> None:
        """Move on by so much."""
        self._progress.update(self._task, advance=amount)

    def move(self, amount: int) -> None:
        """Move to so much."""
        self._progress.update(self._task, completed=amount)


@contextmanager
def progress(title: str, total: int | None, *, is_bytes: bool = False) -> Iterator[Bar]:
    """Give a bar that goes away when it is done."""
    counted = DownloadColumn() if is_bytes else TextColumn("{task.completed:,.0f} records")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), counted, TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as made:
        yield Bar(made, title, total)
