"""Figures of a benchmark: what was measured, the bar it is held to, and on which machine.

Knows how figures are shown and written down; nothing of how they are measured.
"""

import json
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache import machine
from hicache.errors import InputError


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, and its bar where it has one."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    """Its bar, in the same unit; one of the two at most."""
    spread: tuple[float, float] | None = None
    """The least and the most of the repetitions, where there were several."""

    @property
    def is_met(self) -> bool:
        """Whether the value keeps to its bar; without one it does."""
        is_low_enough = self.at_most is None or self.value <= self.at_most
        return is_low_enough and (self.at_least is None or self.value >= self.at_least)

    @property
    def limit(self) -> float | None:
        """What the value is held to: at most this, or at least this."""
        return self.at_least if self.at_most is None else self.at_most

    @property
    def bar(self) -> str:
        """The bar as it is shown."""
        if self.limit is None:
            return ""
        return f"{'≥' if self.at_most is None else '≤'} {show(self.limit)}"


@dataclass(slots=True)
class Figures:
    """What one benchmark found, in the order in which it was added."""

    title: str
    figures: list[Figure] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        spread: tuple[float, float] | None = None,
    ) -> None:
        """Note a value and, where it has one, its bar."""
        self.figures.append(Figure(name, value, unit, at_most, at_least, spread))

    def report(self, json_path: Path | None = None) -> int:
        """Print the table, write the file if there is to be one, and return the exit code.

        0 if every bar is met, 1 if not. Raises ``InputError`` if the file cannot be written.
        """
        open_console().print(self._table())
        if json_path is not None:
            write_json(json_path, {"machine": describe_machine(), "figures": self.as_json()})
        return 0 if all(figure.is_met for figure in self.figures) else 1

    def as_json(self) -> list[dict[str, object]]:
        """Return the figures as they are written to a file."""
        return [
            {
                "name": figure.name,
                "value": figure.value,
                "unit": figure.unit,
                "limit": figure.limit,
                "is_met": figure.is_met,
                "spread": figure.spread,
            }
            for figure in self.figures
        ]

    def _table(self) -> Table:
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_column("unit")
        table.add_column("bar", justify="right")
        table.add_column("")
        table.add_column("spread", justify="right")
        for figure in self.figures:
            met = "" if figure.limit is None else "met" if figure.is_met else "[bold]missed[/bold]"
            table.add_row(
                escape(figure.name),
                show(figure.value),
                escape(figure.unit),
                figure.bar,
                met,
                "" if figure.spread is None else " to ".join(show(end) for end in figure.spread),
            )
        return table


def open_console() -> Console:
    """Return where results go: stdout, wide enough for a table where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)


def show(value: float) -> str:
    """Return a value with three digits that matter, and no fewer than its whole ones."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):,}".removesuffix(".0")


def write_json(path: Path, content: object) -> None:
    """Write a file of JSON; raise ``InputError`` with its name if that fails."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def describe_machine() -> dict[str, str | int]:
    """Return what a figure depends on: processor, memory and versions.

    torch is named only where it has been loaded.
    """
    described: dict[str, str | int] = {
        "cpu": machine.cpu_model(),
        "cores": machine.num_cpus(),
        "memory_nbytes": machine.total_nbytes(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    if (torch := sys.modules.get("torch")) is not None:
        described["torch"] = str(torch.__version__)
        if torch.cuda.is_available():
            described["gpu"] = str(torch.cuda.get_device_name())
    return described
