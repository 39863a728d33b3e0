"""Figures of a benchmark: the table, the file, the exit code."""

import json
import math
from pathlib import Path

import pytest

from hicache.errors import InputError
from hicache.tools.report import Figures, describe_machine, show


def test_a_missed_bar_is_shown_and_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures("tree")
    figures.add("match [page 16]", 12.3, "µs", at_most=25, spread=(11.9, 14.2))
    figures.add("keys", 9.0, "M tokens/s", at_least=15)

    code = figures.report()

    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert code == 1
    assert "match [page 16] 12.3 µs ≤ 25 met 11.9 to 14.2" in rows
    assert "keys 9 M tokens/s ≥ 15 missed" in rows


def test_bars_that_are_met_and_values_without_one_are_exit_code_0() -> None:
    figures = Figures("tree")
    figures.add("at the bar", 25, "µs", at_most=25)
    figures.add("also at the bar", 15, "M tokens/s", at_least=15)
    figures.add("no bar", 1e9, "s")

    assert figures.report() == 0


@pytest.mark.parametrize("bar", ["at_most", "at_least"])
def test_a_value_that_is_no_number_misses_any_bar(bar: str) -> None:
    figures = Figures("tree")
    figures.add("broken", math.nan, "s", at_most=1 if bar == "at_most" else None)
    figures.add("broken", math.nan, "s", at_least=1 if bar == "at_least" else None)

    assert figures.report() == 1


def test_the_file_has_the_machine_and_every_figure(tmp_path: Path) -> None:
    figures = Figures("tree")
    figures.add("match", 12.25, "µs", at_most=25)
    figures.add("cores", 2, "")
    path = tmp_path / "figures.json"

    figures.report(path)

    written = json.loads(path.read_text())
    assert written["machine"] == describe_machine()
    assert written["figures"] == [
        {
            "name": "match",
            "value": 12.25,
            "unit": "µs",
            "limit": 25,
            "is_met": True,
            "spread": None,
        },
        {"name": "cores", "value": 2, "unit": "", "limit": None, "is_met": True, "spread": None},
    ]


def test_a_file_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Is a directory"):
        Figures("tree").report(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12.3456, "12.3"), (9.0, "9"), (0.00123456, "0.00123"), (1234567.8, "1,234,568")],
)
def test_a_value_is_shown_with_the_digits_that_matter(value: float, text: str) -> None:
    assert show(value) == text


def test_the_machine_is_described() -> None:
    described = describe_machine()

    assert {"cpu", "cores", "memory_nbytes", "platform", "python"} <= described.keys()
