"""What ``hicache replay`` does: reads the trace, runs the replays, and reports."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hicache.errors import ConfigError, InputError
from hicache.tools.replay.explaining import explain
from hicache.tools.replay.exporting import export
from hicache.tools.replay.optimum import find_sharing
from hicache.tools.replay.page import write_page
from hicache.tools.replay.replaying import replay
from hicache.tools.replay.report import describe_run, describe_trace
from hicache.tools.replay.settings import Settings
from hicache.tools.replay.sweeping import combine, run_all
from hicache.tools.replay.tables import print_report, write_csv
from hicache.tools.replay.workload import Pace, Workload, load
from hicache.tools.report import open_console, write_json
from hicache.tools.traces.normal import Trace
from hicache.tools.traces.opening import MAX_BAD_LINES, open_trace
from hicache.tools.traces.sources import STDIN
from hicache.tools.traces.tokenizing import load_tokenizer


@dataclass(frozen=True, slots=True)
class Source:
    """Which trace, and what a person says of it."""

    path: str
    format: str | None = None
    block_size: int | None = None
    tokenizer: Path | None = None
    max_bad_lines: int = MAX_BAD_LINES

    @property
    def name(self) -> str:
        """The file's name, as a report has it."""
        return "stdin" if self.path == STDIN else Path(self.path).name

    def open(self) -> Trace:
        """Return the trace; ``InputError`` in one line where there is none."""
        return open_trace(
            self.path,
            format=self.format,
            block_size=self.block_size,
            max_bad_lines=self.max_bad_lines,
            tokenizer=None if self.tokenizer is None else load_tokenizer(self.tokenizer),
        )


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a report goes, beside the terminal."""

    json: Path | None = None
    csv: Path | None = None
    html: Path | None = None
    explain: int | None = None
    export: str | None = None
    export_to: Path | None = None


def run(
    source: Source,
    settings: Settings,
    sweeps: Sequence[str],
    pace: Pace,
    outputs: Outputs,
) -> int:
    """Replay a trace with all combinations of the sweeps; return the exit code.

    That is 1 where lines of the trace were left out. Raises ``ConfigError`` or ``InputError`` in
    one line for what cannot be read, run or written.
    """
    runs = combine(settings, sweeps)
    if outputs.explain is not None and len(runs) > 1:
        raise ConfigError("--explain: tells of one run; leave out --sweep")
    if outputs.export_to is not None and outputs.export is None:
        raise ConfigError("--export-to: say in which form with --export")
    reports = [outputs.json, outputs.csv, outputs.html]
    if outputs.export is not None and (sweeps or any(reports) or outputs.explain is not None):
        raise ConfigError("--export: writes references and no report; leave out the other outputs")
    for path in filter(None, [*reports, outputs.export_to]):
        if not path.parent.is_dir():  # before the work, not behind it
            raise InputError(f"{path}: No such directory")
    trace = source.open()
    with _working(f"reading {source.name}"):
        workloads = _workloads(trace, runs, pace)
    for line in trace.info.bad_lines:
        print(f"hicache: {line}", file=sys.stderr)
    code = 1 if trace.info.num_bad_lines else 0
    first = workloads[runs[0].page_size]
    if outputs.export is not None:
        path = outputs.export_to or Path(f"{source.name.split('.')[0]}.oracleGeneral")
        num_references = export(first, outputs.export, path)
        print(f"{num_references:,} references written to {path}")
        return code
    sharing = {size: find_sharing(workload) for size, workload in workloads.items()}
    about = {"file": source.name, **describe_trace(first, sharing[runs[0].page_size])}
    if outputs.explain is not None:
        replayed = replay(first, runs[0], sharing[runs[0].page_size])
        print("\n".join(explain(replayed, outputs.explain)))
        described = [describe_run(replayed)]
    else:
        with _working(f"replaying {len(first.jobs):,} requests, {len(runs)} time(s)"):
            described = run_all(workloads, runs, sharing)
        print_report(open_console(), about, described)
    _write(outputs, about, described)
    return code


def _workloads(trace: Trace, runs: Sequence[Settings], pace: Pace) -> dict[int | None, Workload]:
    """Cut the trace into pages of each size that is wanted, reading it once."""
    has_outputs = runs[0].has_outputs
    sizes = dict.fromkeys(settings.page_size for settings in runs)
    if len(sizes) > 1:
        requests = list(trace)
        trace = Trace(trace.info, lambda: iter(requests))
    return {size: load(trace, page_size=size, pace=pace, has_outputs=has_outputs) for size in sizes}


def _write(
    outputs: Outputs, about: dict[str, object], described: Sequence[dict[str, object]]
) -> None:
    if outputs.json is not None:
        write_json(outputs.json, {"trace": about, "runs": described})
    if outputs.csv is not None:
        write_csv(outputs.csv, described)
    if outputs.html is not None:
        write_page(outputs.html, about, described)


@contextmanager
def _working(what: str) -> Iterator[None]:
    """Say on stderr what takes its time, where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
