"""Line plots as SVG, drawn by hand: no dependency, and one file holds a whole report."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 34, 48

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444", "#8c6d31")
"""Told apart also by those who do not see all colours."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot whose y axis is a share from 0 to 1."""

    title: str
    x_name: str
    lines: Sequence[Line]
    is_stacked: bool = False
    """Whether each line is drawn on top of the one before, with its area filled."""

    def svg(self) -> str:
        """Return the plot as an SVG element."""
        lines = _stack(self.lines) if self.is_stacked else list(self.lines)
        xs = [x for line in lines for x, _ in line.points] or [0.0]
        ys = [y for line in lines for _, y in line.points] or [0.0]
        frame = _Frame(min(xs), max(xs), min(1.0, _round_up(max(ys))))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">'
            f"{escape(self.title)}</text>",
            *frame.axes(self.x_name),
        ]
        below: Sequence[tuple[float, float]]
        below = [(x, 0.0) for line in lines[:1] for x, _ in line.points]
        for number, line in enumerate(lines):
            colour = COLOURS[number % len(COLOURS)]
            if self.is_stacked:
                outline = [*line.points, *reversed(below)]
                parts.append(
                    f'<polygon points="{frame.path(outline)}" fill="{colour}" fill-opacity="0.75"/>'
                )
                below = line.points
            else:
                dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
                parts.append(
                    f'<polyline points="{frame.path(line.points)}" fill="none" '
                    f'stroke="{colour}" stroke-width="2"{dash}/>'
                )
                if not line.is_dashed:
                    parts += [
                        f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" '
                        f'fill="{colour}"/>'
                        for x, y in line.points
                    ]
            parts += _legend(number, line.name, colour)
        return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where values lie on the picture."""

    low: float
    high: float
    top: float

    def x(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - value / self.top * (HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def axes(self, x_name: str) -> list[str]:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        parts = []
        for step in range(6):
            share = self.top * step / 5
            y = self.y(share)
            parts.append(
                f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>'
                f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
                f"{100 * share:.3g} %</text>"
            )
            value = self.low + (self.high - self.low) * step / 5
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{bottom + 18}" text-anchor="middle">'
                f"{_short(value)}</text>"
            )
        middle = (_LEFT + right) / 2
        parts.append(
            f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_name)}</text>'
        )
        return parts


def _legend(number: int, name: str, colour: str) -> list[str]:
    x, y = WIDTH - _RIGHT + 16, _TOP + 8 + 18 * number
    return [
        f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>',
        f'<text x="{x + 18}" y="{y}">{escape(name[:28])}</text>',
    ]


def _stack(lines: Sequence[Line]) -> list[Line]:
    stacked: list[Line] = []
    heights: dict[float, float] = {}
    for line in lines:
        points = []
        for x, y in line.points:
            heights[x] = heights.get(x, 0.0) + y
            points.append((x, heights[x]))
        stacked.append(Line(line.name, points))
    return stacked


def _round_up(share: float) -> float:
    """Return the top of an axis for values up to ``share``."""
    return next((top for top in (0.05, 0.1, 0.25, 0.5, 0.75) if share <= top), 1.0)


def _short(value: float) -> str:
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if sign == 'k' else limit):.3g}{sign}"
    return f"{value:.4g}"
