"""A report on the terminal, and as a CSV file."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache.errors import InputError

Described = Mapping[str, Any]
"""A trace or a run as ``report`` describes it."""


def print_report(console: Console, trace: Described, runs: Sequence[Described]) -> None:
    """Print a table of all runs, and what else there is to say of one."""
    console.print(
        f"[bold]{escape(str(trace['format']))}[/bold]: {trace['num_requests']:,} requests, "
        f"{trace['num_sessions']:,} sessions, {trace['num_input_tokens']:,} prompt tokens, "
        f"{trace['num_unique_pages']:,} unique pages of {trace['num_pages']:,}; "
        f"arrival: {escape(str(trace['pace']))}; outputs are "
        f"{'kept' if trace['has_outputs'] else 'not kept'}"
    )
    if trace["note"]:
        console.print(escape(str(trace["note"])))
    console.print(_table(runs))
    if len(runs) == 1:
        console.print(_details(runs[0]))
    console.print(
        "L1, L2, L3 and blocks: pages hit / pages of all requests; tokens: tokens hit / prompt "
        "tokens.\ninfinite, MIN: the optimum without end, and of the same size, in blocks.",
        style="dim",
    )


def write_csv(path: Path, runs: Sequence[Described]) -> None:
    """Write one line a run; raise ``InputError`` if that fails."""
    rows = [_flat("", run) for run in runs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, restval="")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def label(run: Described, runs: Sequence[Described]) -> str:
    """Return what tells a run from the others, in a few words."""
    configs = [cast(Described, other["config"]) for other in runs]
    shown = ("l1", "l2", "l3", "eviction", "write", "admission", "prefetch", "page_size",
             "concurrency", "layer_groups", "prefill_tokens_per_s", "host_eviction")  # fmt: skip
    config = cast(Described, run["config"])
    names = [name for name in shown if len({str(other[name]) for other in configs}) > 1]
    if "eviction" in names and "host_eviction" in names:
        names.remove("host_eviction")
    return " ".join(f"{name}={config[name]}" for name in names or ("l1", "l2", "l3"))


def seconds_text(run: Described, percentile: str) -> str:
    """Return a time to first token as people read it; nothing where computing took no time."""
    value = run["ttft_s"][percentile]
    if run["config"]["prefill_tokens_per_s"] is None:
        return ""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:,.2f} s"


def nbytes_text(nbytes: int) -> str:
    """Return a number of bytes as people read it."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if nbytes >= limit:
            return f"{nbytes / limit:,.2f} {unit}"
    return f"{nbytes:,} B"


def _table(runs: Sequence[Described]) -> Table:
    table = Table(title="Hit rate, %", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("run", overflow="fold")
    for name in ("L1", "L2", "L3", "blocks", "tokens", "infinite", "MIN", "TTFT p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for run in runs:
        blocks, optimum = run["hit_rate"]["blocks"], run["optimum"]
        table.add_row(
            escape(label(run, runs)),
            *(_percent(blocks[tier]) for tier in ("device", "host", "storage", "total")),
            _percent(run["hit_rate"]["tokens"]["total"]),
            _percent(optimum["infinite"]),
            "" if optimum["min"] is None else _percent(optimum["min"]),
            *(seconds_text(run, name) for name in ("p50", "p90", "p99")),
        )
    return table


def _details(run: Described) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, num_pages in run["misses"].items():
        table.add_row(f"missed, {name}", f"{num_pages:,} pages")
    for tier, reasons in run["evicted_pages"].items():
        for reason, num_pages in reasons.items():
            table.add_row(f"left {tier}, {reason}", f"{num_pages:,} pages")
    for hop, nbytes in run["bytes"].items():
        table.add_row(f"moved, {hop}", nbytes_text(nbytes))
    table.add_row("stored", f"{run['storage_bytes_per_prompt_token']:,.0f} bytes/prompt token")
    table.add_row("requests refused", f"{run['num_refused_requests']:,}")
    num_warm = run["num_warm_up_requests"]
    for name, what in (("warm_up", f"first {num_warm:,} requests"), ("after_warm_up", "the rest")):
        rate = run[f"hit_rate_{name}"]["blocks"]["total"]
        table.add_row(f"hit rate, blocks, {what}", f"{_percent(rate)} %")
    requests = run["hit_rate"]["requests"]["total"]
    table.add_row("hit rate, requests with any hit", f"{_percent(requests)} %")
    for name, rate in run["other_hit_rates"].items():
        table.add_row(f"hit rate, {name}", f"{_percent(rate)} %")
    table.add_row("below the infinite cache", f"{_percent(run['optimum']['gap_to_infinite'])} %")
    return table


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}"


def _flat(prefix: str, values: Described) -> dict[str, object]:
    row: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            row.update(_flat(f"{prefix}{name}.", value))
        elif not isinstance(value, list):
            row[f"{prefix}{name}"] = value
    return row
