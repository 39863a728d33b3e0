"""What ``hicache replay`` does: reads the trace, runs the replays, and reports."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hicache.errors import ConfigError
from hicache.tools.replay.explaining import explain
from hicache.tools.replay.exporting import export
from hicache.tools.replay.page import write_page
from hicache.tools.replay.replaying import replay
from hicache.tools.replay.report import describe_run, describe_trace
from hicache.tools.replay.settings import Settings
from hicache.tools.replay.sweeping import combine, run_all
from hicache.tools.replay.tables import print_report, write_csv
from hicache.tools.replay.workload import Pace, load
from hicache.tools.report import open_console, write_json
from hicache.tools.traces.opening import open_trace


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
    trace: str,
    settings: Settings,
    sweeps: Sequence[str],
    pace: Pace,
    outputs: Outputs,
    trace_format: str | None = None,
) -> int:
    """Replay a trace with all combinations of the sweeps; return the exit code.

    Raises ``ConfigError`` or ``InputError`` in one line for what cannot be read, run or written.
    """
    runs = combine(settings, sweeps)
    settings = runs[0]
    if len({run.page_size for run in runs}) > 1:
        raise ConfigError("--sweep page_size: one size a command; the trace is cut into pages once")
    workload = load(open_trace(trace, format=trace_format), page_size=settings.page_size, pace=pace)
    if workload.num_bad_lines:
        print(f"hicache: {workload.num_bad_lines} malformed lines left out", file=sys.stderr)
    if outputs.export is not None:
        if outputs.export_to is None:
            raise ConfigError("--export: say where with --export-to FILE")
        num_references = export(workload, outputs.export, outputs.export_to)
        print(f"{num_references} references written to {outputs.export_to}", file=sys.stderr)
        return 0
    with Console(stderr=True).status(f"replaying {len(workload.jobs):,} requests"):
        first = replay(workload, settings)
        described = [describe_run(first)]
        if len(runs) > 1:
            described += run_all(workload, runs[1:])
    about = {"file": Path(trace).name, **describe_trace(first)}
    if outputs.explain is not None:
        print("\n".join(explain(first, outputs.explain)))
    else:
        print_report(open_console(), about, described)
    if outputs.json is not None:
        write_json(outputs.json, {"trace": about, "runs": described})
    if outputs.csv is not None:
        write_csv(outputs.csv, described)
    if outputs.html is not None:
        write_page(outputs.html, about, described)
    return 0
