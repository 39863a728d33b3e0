"""``hicache trace show`` and ``hicache trace generate``: what they print and write."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from hicache.errors import InputError
from hicache.tools.report import open_console, write_json
from hicache.tools.traces.generating import Load, generate, write
from hicache.tools.traces.normal import Trace, TraceInfo, TraceRequest
from hicache.tools.traces.shapes import KINDS, Shape
from hicache.tools.traces.summary import Summary, summarise

STDERR = 2


def show(trace: Trace, name: str, json_path: Path | None = None) -> int:
    """Read a trace, print what it holds; 1 if lines of it are malformed."""
    summary = summarise(trace.info, _watched(trace))
    open_console().print(_table(name, trace.info, summary))
    for line in trace.info.bad_lines:
        print(f"hicache: {line}", file=sys.stderr)
    if json_path is not None:
        write_json(json_path, {"trace": {"file": name, **as_json(trace.info, summary)}})
    return 1 if trace.info.num_bad_lines else 0


def write_load(load: Load, path: Path | None, json_path: Path | None = None) -> int:
    """Generate a trace into a file, or to stdout, and print what it holds.

    What is printed goes to stderr where the trace itself goes to stdout.
    """
    summary, info = Summary(load.block_size), load.info
    write(path, info, summary.passing(_watched(generate(load))))
    console = open_console() if path is not None else Console(stderr=True)
    console.print(_table("generated" if path is None else str(path), info, summary))
    if json_path is not None:
        write_json(json_path, {"trace": as_json(info, summary)})
    return 0


def shape_of(kind: str, settings: dict[str, str]) -> Shape:
    """Return what a kind of load looks like; ``InputError`` for a name or number that is wrong."""
    if kind not in KINDS:
        raise InputError(f"{kind!r} is no kind of load: {', '.join(KINDS)}")
    try:
        return KINDS[kind].model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        names = ", ".join(KINDS[kind].model_fields)
        is_unknown = first["type"] == "extra_forbidden"
        why = f"no such number, there are {names}" if is_unknown else first["msg"]
        raise InputError(f"{kind}: {name}: {why}") from None


def as_json(info: TraceInfo, summary: Summary) -> dict[str, object]:
    """Return what is written to a file of a trace."""
    return {
        "format": info.format,
        "block_size": info.block_size,
        "has_times": info.has_times,
        "has_blocks": info.has_blocks,
        "note": info.note,
        "bad_lines": info.num_bad_lines,
        **summary.as_json(),
    }


def _watched(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Give the requests on, and count them on stderr where that is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} requests"))
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not os.isatty(STDERR)
    ) as progress:
        task = progress.add_task("requests", total=None)
        for request in requests:
            progress.advance(task)
            yield request


def _table(name: str, info: TraceInfo, summary: Summary) -> Table:
    table = Table(title=escape(name), title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column("what")
    table.add_column("value")
    for what, value in _rows(info, summary):
        table.add_row(what, escape(value))
    return table


def _rows(info: TraceInfo, summary: Summary) -> Iterator[tuple[str, str]]:
    requests = max(1, summary.num_requests)
    yield "format", info.format
    if info.note:
        yield "note", info.note
    continuing = f", {summary.num_continuing:,} continue an earlier one"
    yield "requests", f"{summary.num_requests:,}{continuing if summary.num_continuing else ''}"
    yield "sessions", f"{len(summary.sessions):,}"
    if len(summary.tenants) > 1:
        yield "tenants", f"{len(summary.tenants):,}"
    mean, longest = summary.num_input_tokens / requests, summary.longest_input_tokens
    inputs = f"{summary.num_input_tokens:,}"
    yield "input tokens", f"{inputs} ({mean:,.0f} a request, longest {longest:,})"
    outputs = summary.num_output_tokens
    yield "output tokens", f"{outputs:,} ({outputs / requests:,.0f} a request)"
    references, unique = summary.num_block_references, summary.num_blocks
    yield "blocks", f"{references:,} of {info.block_size} tokens, {unique:,} different"
    yield "optimum", _optimum(info, summary)
    yield "times", _times(info, summary)
    if info.num_bad_lines:
        yield "malformed", f"{info.num_bad_lines:,} lines, left out"


def _optimum(info: TraceInfo, summary: Summary) -> str:
    if not info.has_blocks:
        return "unknown: the trace does not tell what is shared"
    if not summary.num_block_references:
        return "unknown: no request was read"
    tokens, blocks = summary.token_optimum, summary.block_optimum
    return f"an infinite cache hits {tokens:.2%} of tokens, {blocks:.2%} of blocks"


def _times(info: TraceInfo, summary: Summary) -> str:
    if summary.first_s is None or summary.last_s is None:
        return "none"
    span = f"{summary.first_s:,.1f} to {summary.last_s:,.1f} s"
    if not info.has_times:
        return f"{span} from the start of each session"
    return span if summary.is_in_order else f"{span}, not in order"
