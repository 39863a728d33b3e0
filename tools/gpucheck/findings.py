"""What a section found: results that are right or wrong, figures, and remarks."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Status = Literal["right", "wrong", "died", "skipped"]


@dataclass(frozen=True, slots=True)
class Result:
    """Something that is right or wrong."""

    name: str
    is_right: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that was measured."""

    name: str
    value: float
    unit: str


@dataclass(slots=True)
class Report:
    """All that one section found, in the order in which it was found."""

    section: str
    budget_s: float = 0.0
    seconds: float = 0.0
    status: Status = "right"
    why: str = ""
    """Why it died or was skipped."""
    results: list[Result] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_fine(self) -> bool:
        """Whether nothing is wrong, as far as it was looked at."""
        return self.status in ("right", "skipped")

    def result(self, name: str, is_right: bool, detail: str = "") -> None:
        """Note whether something is right."""
        self.results.append(Result(name, is_right, detail))
        if not is_right and self.status == "right":
            self.status = "wrong"

    def figure(self, name: str, value: float, unit: str) -> None:
        """Note a measured value."""
        self.figures.append(Figure(name, value, unit))

    def note(self, text: str) -> None:
        """Note what a reader must know."""
        self.notes.append(text)

    @classmethod
    def read(cls, text: str) -> "Report":
        """Return a report that ``written`` wrote."""
        content = json.loads(text)
        results = [Result(**result) for result in content.pop("results")]
        figures = [Figure(**figure) for figure in content.pop("figures")]
        return cls(**content, results=results, figures=figures)

    def written(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))


def to_json(reports: Sequence[Report], device: str) -> str:
    """Return all reports as a file of JSON."""
    content = {
        "device": device,
        "is_fine": all(report.is_fine for report in reports),
        "seconds": sum(report.seconds for report in reports),
        "sections": [asdict(report) for report in reports],
    }
    return json.dumps(content, indent=2) + "\n"


def table(reports: Sequence[Report]) -> str:
    """Return all reports as lines for people."""
    lines: list[str] = []
    for report in reports:
        why = f": {report.why}" if report.why else ""
        took = f"{report.seconds:.1f} of {report.budget_s:.0f} s"
        lines.append(f"== {report.section}: {report.status}{why} ({took})")
        for result in report.results:
            verdict = "right" if result.is_right else "WRONG"
            detail = f"  {result.detail}" if result.detail else ""
            lines.append(f"  {verdict}  {result.name}{detail}")
        lines += [
            f"  {figure.name:<58} {show(figure.value):>12} {figure.unit}"
            for figure in report.figures
        ]
        lines += [f"  - {note}" for note in report.notes]
    num_results = sum(len(report.results) for report in reports)
    num_wrong = sum(not result.is_right for report in reports for result in report.results)
    num_died = sum(report.status == "died" for report in reports)
    lines.append(
        f"{num_results} results, {num_wrong} wrong; {num_died} of {len(reports)} sections died; "
        f"{sum(report.seconds for report in reports):.1f} s"
    )
    return "\n".join(lines)


def show(value: float) -> str:
    """Return a value with three digits that matter, and no fewer than its whole ones."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{float(f'{value:.3g}'):,}"
