"""Plots as SVG, drawn by hand: no dependency, and one file holds a whole report."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 40, 46
_HEIGHT = 300
"""Of the area that lines are drawn in, with its axes; a legend comes below."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#8c6d31")
"""Told apart also by those who do not see all colours."""

_CHAR = 7.0
"""Pixels that a letter of a legend takes at most."""


def percent(share: float) -> str:
    """Return a share as an axis names it."""
    return f"{100 * share:.3g} %"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False
    colour: str = ""
    """Default: the next one."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over one x axis."""

    title: str
    x_name: str
    lines: Sequence[Line]
    is_stacked: bool = False
    """Whether lines that are not dashed are areas, each on top of the one before."""
    x_ticks: Sequence[tuple[float, str]] | None = None
    """Where they are given, the axis is logarithmic: a size beside its double is a step."""
    y_text: Callable[[float], str] = percent
    y_max: float | None = 1.0
    """What the y axis never exceeds."""

    def svg(self) -> str:
        """Return the plot as an SVG element."""
        lines = _coloured(_stacked(self.lines) if self.is_stacked else self.lines)
        xs = [x for line in lines for x, _ in line.points] or [0.0]
        ys = [y for line in lines for _, y in line.points] or [0.0]
        top = _top(max(ys), self.y_max)
        bottom = 0.0 if self.is_stacked else _floor(min(ys), max(ys))
        frame = _Frame(min(xs), max(xs), bottom, top, self.x_ticks is not None)
        areas = [line for line in lines if self.is_stacked and not line.is_dashed]
        below: Sequence[tuple[float, float]] = [
            (x, 0.0) for line in areas[:1] for x, _ in line.points
        ]
        parts = [*frame.axes(self)]
        for area in areas:
            outline = frame.path([*area.points, *reversed(below)])
            parts.append(f'<polygon points="{outline}" fill="{area.colour}" fill-opacity="0.8"/>')
            below = area.points
        for line in lines:
            if line not in areas:
                parts += _drawn(line, frame)
        names = [(line.name, line.colour, line.is_dashed) for line in lines]
        legend = list(_legend(names, _HEIGHT + 16))
        height = _HEIGHT + 18 * len(legend) + 8
        return _document(self.title, height, [*parts, *legend])


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar a row, each of parts that add up to 1 at most."""

    title: str
    rows: Sequence[tuple[str, Sequence[float]]]
    parts: Sequence[tuple[str, str]]
    """Name and colour of each part."""

    def svg(self) -> str:
        """Return the bars as an SVG element."""
        longest = max((len(name) for name, _ in self.rows), default=0)
        left = min(360.0, 16 + _CHAR * longest)
        drawn, y = [], float(_TOP)
        for name, shares in self.rows:
            label = escape(_short_name(name, int(344 / _CHAR)))
            drawn.append(
                f'<text x="{left - 8:.0f}" y="{y + 13:.0f}" text-anchor="end">{label}</text>'
            )
            x = left
            for share, (part, colour) in zip(shares, self.parts, strict=True):
                width = share * (WIDTH - _RIGHT - left)
                if width <= 0:
                    continue
                drawn.append(
                    f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="18" '
                    f'fill="{colour}"><title>{escape(part)}: {percent(share)}</title></rect>'
                )
                if width > 44:
                    drawn.append(
                        f'<text x="{x + width / 2:.1f}" y="{y + 13:.0f}" text-anchor="middle" '
                        f'fill="#ffffff" font-size="11">{100 * share:.1f} %</text>'
                    )
                x += width
            y += 24
        legend = list(_legend([(part, colour, False) for part, colour in self.parts], y + 18))
        return _document(self.title, y + 18 * len(legend) + 12, [*drawn, *legend])


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where values lie on the picture."""

    low: float
    high: float
    bottom: float
    top: float
    is_log: bool

    def x(self, value: float) -> float:
        if self.is_log and self.low > 0:
            share = math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.bottom) / (self.top - self.bottom)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def axes(self, plot: Plot) -> Iterator[str]:
        right, bottom = WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        for value in _steps(self.bottom, self.top):
            y = self.y(value)
            yield (
                f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e2e2e2"/>'
                f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
                f"{escape(plot.y_text(value))}</text>"
            )
        ticks = plot.x_ticks or [(value, _number(value)) for value in _steps(self.low, self.high)]
        last = -math.inf
        for value, text in ticks:
            x = self.x(value)
            yield f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#888"/>'
            if x - last > _CHAR * (len(text) + 1):
                last = x
                yield (
                    f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">'
                    f"{escape(text)}</text>"
                )
        yield (
            f'<text x="{(_LEFT + right) / 2:.0f}" y="{bottom + 36}" text-anchor="middle" '
            f'fill="#555">{escape(plot.x_name)}</text>'
        )


def _document(title: str, height: float, parts: Sequence[str]) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" font-family="sans-serif" font-size="12" '
        f'role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        *parts,
        "</svg>",
    ])  # fmt: skip


def _drawn(line: Line, frame: _Frame) -> Iterator[str]:
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    yield (
        f'<polyline points="{frame.path(line.points)}" fill="none" stroke="{line.colour}" '
        f'stroke-width="{1.5 if line.is_dashed else 2}"{dash}/>'
    )
    if not line.is_dashed:
        for x, y in line.points:
            at = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"'
            yield f'<circle {at} r="3" fill="{line.colour}"/>'


def _legend(entries: Sequence[tuple[str, str, bool]], y: float) -> Iterator[str]:
    """Give rows of names with their colours, as many in a row as there is room for."""
    row, x = "", 16.0
    for name, colour, is_dashed in entries:
        name = _short_name(name, 90)
        width = 26 + _CHAR * len(name)
        if row and x + width > WIDTH:
            yield row
            row, x, y = "", 16.0, y + 18
        mark = f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="12" height="10" fill="{colour}"/>'
        if is_dashed:
            mark = (
                f'<line x1="{x - 2:.0f}" y1="{y - 4:.0f}" x2="{x + 13:.0f}" y2="{y - 4:.0f}" '
                f'stroke="{colour}" stroke-width="2" stroke-dasharray="6 3"/>'
            )
        row += f'{mark}<text x="{x + 17:.0f}" y="{y:.0f}">{escape(name)}</text>'
        x += width
    if row:
        yield row


def _coloured(lines: Sequence[Line]) -> list[Line]:
    colours = iter(COLOURS * (len(lines) // len(COLOURS) + 1))
    return [
        Line(line.name, line.points, line.is_dashed, line.colour or next(colours)) for line in lines
    ]


def _stacked(lines: Sequence[Line]) -> list[Line]:
    stacked: list[Line] = []
    heights: dict[float, float] = {}
    for line in lines:
        if line.is_dashed:
            stacked.append(line)
            continue
        points = []
        for x, y in line.points:
            heights[x] = heights.get(x, 0.0) + y
            points.append((x, heights[x]))
        stacked.append(Line(line.name, points, colour=line.colour))
    return stacked


def _step(span: float) -> float:
    """Return a round step that divides a span into five parts or so."""
    power = 10 ** math.floor(math.log10(span / 5)) if span > 0 else 1.0
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= 6)


def _steps(low: float, high: float) -> list[float]:
    step = _step(high - low)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _top(highest: float, limit: float | None) -> float:
    """Return the top of an axis for values up to ``highest``."""
    step = _step(highest) if highest > 0 else 0.1
    top = math.ceil(highest / step + 0.2) * step
    return top if limit is None else min(limit, top)


def _floor(lowest: float, highest: float) -> float:
    """Return where an axis begins: at 0, but where all values lie close together far above."""
    if lowest < 0.6 * highest:
        return 0.0
    step = _step(max(highest - lowest, highest / 50))
    return max(0.0, math.floor(lowest / step - 0.2) * step)


def _number(value: float) -> str:
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if sign == 'k' else limit):.4g}{sign}"
    return f"{value:.4g}"


def _short_name(name: str, num_chars: int) -> str:
    return name if len(name) <= num_chars else name[: num_chars - 1] + "…"
