"""How ``hicache demo`` looks: a table that grows turn by turn on a terminal, plain lines elsewhere.

Everything goes to stdout. Knows nothing of engines and processes.
"""

import sys
import threading
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hicache.tools.demo_results import TIERS, Results, Turn, total_hit, total_prompt

STYLES = {"device": ("green", "█"), "host": ("yellow", "▓"), "storage": ("magenta", "▒")}
"""Colour and sign of a tier; the signs tell them apart where there is no colour."""

COMPUTED = ("bright_black", "·")
MIN_BAR, MAX_BAR = 12, 48
FIXED_WIDTH = 58
"""Columns that the table needs beside its bars."""


class View:
    """Shows results as they come in. Use it in a ``with``."""

    def __init__(self, results: Results, console: Console) -> None:
        self._results = results
        self._console = console
        self._lock = threading.Lock()
        self._act = ""
        self._explained = ""
        self._said = Text()
        self._spinner = Spinner("dots", "")
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._render, transient=True, refresh_per_second=8
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def explain(self, act: str, text: str) -> None:
        """Say what is to be seen from now on."""
        self._act, self._explained, self._said = act, text, Text()
        if self._live is None:
            self._print(f"\n{act}: {text}")

    def wait_for(self, text: str) -> None:
        """Say what is being done."""
        self._spinner.update(text=Text(text, overflow="ellipsis", no_wrap=True))

    def note(self, text: str) -> None:
        """Pass on what another process says. From any thread."""
        if self._live is None:
            print(text, file=sys.stderr)
        else:
            self._live.console.print(text, style="dim", markup=False)

    def answered(self, turn: Turn) -> None:
        """Show a turn that was answered, with the cache or now without."""
        if self._live is not None:
            self._said = Text(f"{turn.chat}: {turn.question} ", no_wrap=True, overflow="ellipsis")
            self._said.append(_in_a_line(turn.answer), style="italic")
            self._live.refresh()
        elif turn.computed_ttft_s is None:
            hits = "  ".join(f"{tier} {getattr(turn.hit, name):>3}" for name, tier in TIERS.items())
            self._print(
                f"{turn.chat:<5} prompt {turn.prompt_tokens}  {hits}  "
                f"new {turn.prompt_tokens - turn.hit.total:>3}  "
                f"first token {turn.ttft_s:.2f} s  {_in_a_line(turn.answer)}"
            )
        else:
            same = "same tokens" if turn.is_equal else "OTHER TOKENS"
            self._print(
                f"{turn.chat:<5} prompt {turn.prompt_tokens}  "
                f"first token {turn.computed_ttft_s:.2f} s  {same}"
            )

    def conclude(self) -> None:
        """Show the whole table, and what it comes to."""
        if self._live is not None:
            self._live.stop()
        self._print("")
        self._print(self._table())
        self._print(self._summary())

    # ------------------------------------------------------------ what is shown

    def _render(self) -> RenderableType:
        return Group(
            Text(f"HiCache: {self._act}", style="bold"),
            Text(self._explained),
            self._table(),
            _legend(),
            self._said,
            self._spinner,
        )

    def _table(self) -> Table:
        bar_width = max(MIN_BAR, min(MAX_BAR, self._console.width - FIXED_WIDTH))
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("chat", no_wrap=True)
        table.add_column("prompt", justify="right")
        table.add_column("found in", width=bar_width, no_wrap=True)
        for name, tier in TIERS.items():
            table.add_column(tier, justify="right", style=STYLES[name][0], min_width=3)
        table.add_column("new", justify="right", min_width=3)
        table.add_column("TTFT", justify="right", min_width=6)
        table.add_column("no cache", justify="right")
        table.add_column("faster", justify="right")
        table.add_column("", min_width=1)
        longest = max((turn.prompt_tokens for turn in self._results.turns), default=1)
        for turn in self._results.turns:
            if turn is next(iter(self._results.after_restart), None):
                table.add_row("", "", Text("a new process", style="italic"))
            table.add_row(*_row(turn, bar_width, longest))
        return table

    def _summary(self) -> Panel:
        results = self._results
        problems = results.problems()
        lines = [
            _sources("Before the restart", results.before_restart),
            _sources("After it", results.after_restart),
            f"The first token came after {results.cached_p50_s:.2f} s with the cache, after "
            f"{results.computed_p50_s:.2f} s without (medians): "
            f"[bold]{results.speedup:.1f} times[/bold] as fast.",
        ]
        if problems:
            lines += [f"[bold red]{escape(problem)}.[/]" for problem in problems]
        else:
            lines.append(f"All {len(results.turns)} answers are the same, token by token.")
        text = Text.from_markup("\n".join(lines))  # printed where markup in answers is off
        return Panel(text, title="HiCache", title_align="left", width=self._width)

    @property
    def _width(self) -> int:
        return min(self._console.width, 100)

    def _print(self, what: RenderableType) -> None:
        is_line = isinstance(what, str)
        self._console.print(what, highlight=False, markup=False, soft_wrap=is_line)


def open_view_console() -> Console:
    """Return where the demo is shown: stdout, as wide as the table where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 100)


def _row(turn: Turn, width: int, longest: int) -> list[RenderableType]:
    hit, new = turn.hit, turn.prompt_tokens - turn.hit.total
    faster, mark = "", Text("")
    if turn.computed_ttft_s is not None:
        faster = f"{turn.computed_ttft_s / turn.ttft_s:.1f}x"
        mark = Text("=", style="green") if turn.is_equal else Text("≠", style="bold red")
    without = "" if turn.computed_ttft_s is None else f"{turn.computed_ttft_s:.2f} s"
    return [
        turn.chat,
        str(turn.prompt_tokens),
        _bar(turn, round(width * turn.prompt_tokens / longest)),
        *(str(count or "") for count in (hit.device, hit.host, hit.storage)),
        str(new),
        f"{turn.ttft_s:.2f} s",
        without,
        faster,
        mark,
    ]


def _bar(turn: Turn, width: int) -> Text:
    """Return a prompt as a bar: its tokens by where they were found."""
    parts = [(getattr(turn.hit, name), *STYLES[name]) for name in TIERS]
    parts.append((turn.prompt_tokens - turn.hit.total, *COMPUTED))
    bar, done, drawn = Text(), 0, 0
    for count, style, sign in parts:
        done += count
        end = round(width * done / turn.prompt_tokens)
        bar.append(sign * (end - drawn), style=style)
        drawn = end
    return bar


def _legend() -> Text:
    legend = Text()
    for name, tier in TIERS.items():
        style, sign = STYLES[name]
        legend.append(f"{sign * 2} ", style=style).append(f"{tier} {name}   ")
    style, sign = COMPUTED
    return legend.append(f"{sign * 2} ", style=style).append("new: computed")


def _sources(when: str, turns: list[Turn]) -> str:
    hit, total = total_hit(turns), total_prompt(turns)
    parts = [
        f"[{STYLES[name][0]}]{getattr(hit, name) / total:.0%} {tier}[/]"
        for name, tier in TIERS.items()
    ]
    new = (total - hit.total) / total
    return f"{when}: {total:,} prompt tokens, {', '.join(parts)}, {new:.0%} computed."


def _in_a_line(text: str) -> str:
    return " ".join(text.split())
