"""A report as one HTML file that needs nothing else: tables, and plots as inline SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hicache.errors import InputError
from hicache.tools.replay.plots import Line, Plot
from hicache.tools.replay.tables import Described, label

_STYLE = """
body { font-family: sans-serif; margin: 2em auto; max-width: 62em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 0.9em; }
th, td { padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
.note { color: #666; font-size: 0.9em; }
"""

_TIERS = {"device": "L1", "host": "L2", "storage": "L3"}

MAX_OVER_TIME = 12
"""Runs whose hit rate over time is drawn."""


def write_page(path: Path, trace: Described, runs: Sequence[Described]) -> None:
    """Write the page; raise ``InputError`` if that fails."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>hicache replay</title>",
        f"<style>{_STYLE}</style><h1>hicache replay</h1>",
        f"<p>{escape(str(trace['format']))}: {trace['num_requests']:,} requests, "
        f"{trace['num_input_tokens']:,} prompt tokens, {trace['num_unique_pages']:,} unique pages "
        f"of {trace['num_pages']:,} referred to. Arrival: {escape(str(trace['pace']))}.</p>",
        f"<p class=note>{escape(str(trace['note']))}</p>",
        _summary(runs),
        *(plot.svg() for plot in _over_capacity(runs)),
        *(_over_time(run, runs).svg() for run in runs[:MAX_OVER_TIME]),
        "<h2>What the rates are of</h2><ul>",
        *(f"<li><b>{name}</b>: {escape(text)}" for name, text in trace["denominators"].items()),
        "</ul></html>",
    ]
    try:
        path.write_text("\n".join(parts) + "\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _summary(runs: Sequence[Described]) -> str:
    rows = [
        "<table><tr><th>run<th>L1<th>L2<th>L3<th>blocks<th>tokens<th>infinite<th>MIN"
        "<th>TTFT p50<th>p99<th>stored B/token"
    ]
    for run in runs:
        blocks, optimum = run["hit_rate"]["blocks"], run["optimum"]
        shares = [blocks[tier] for tier in ("device", "host", "storage", "total")]
        shares += [run["hit_rate"]["tokens"]["total"], optimum["infinite"], optimum["min"]]
        cells = ["" if share is None else f"{100 * share:.2f} %" for share in shares]
        cells += [f"{run['ttft_s']['p50']:.2f} s", f"{run['ttft_s']['p99']:.2f} s"]
        cells.append(f"{run['storage_bytes_per_prompt_token']:,.0f}")
        rows.append(f"<tr><td>{escape(label(run, runs))}" + "".join(f"<td>{c}" for c in cells))
    return "\n".join([*rows, "</table>"])


def _over_time(run: Described, runs: Sequence[Described]) -> Plot:
    lines = [
        Line(name, [(point["time_s"], point[tier]) for point in run["over_time"]])
        for tier, name in _TIERS.items()
    ]
    return Plot(f"Hit rate by tier over time: {label(run, runs)}", "seconds", lines, True)


def _over_capacity(runs: Sequence[Described]) -> list[Plot]:
    """One plot for each tier whose size varies: a line for each choice of everything else."""
    plots = []
    for tier, name in _TIERS.items():
        sizes = {_capacity_gb(run, tier) for run in runs} - {None}
        if len(sizes) < 2:
            continue
        found: dict[str, list[tuple[float, float]]] = {}
        least: dict[float, float] = {}
        for run in runs:
            size = _capacity_gb(run, tier)
            if size is None:
                continue
            total = run["hit_rate"]["blocks"]["total"]
            found.setdefault(_others(run, runs, name.lower()), []).append((size, total))
            if run["optimum"]["min"] is not None:
                least[size] = max(run["optimum"]["min"], least.get(size, 0.0))
        lines = [Line(key, sorted(points)) for key, points in found.items()]
        if least:
            lines.append(Line("MIN (Belady)", sorted(least.items()), is_dashed=True))
        infinite = runs[0]["optimum"]["infinite"]
        ends = sorted(size for size in sizes if size is not None)
        lines.append(Line("infinite", [(ends[0], infinite), (ends[-1], infinite)], is_dashed=True))
        plots.append(Plot(f"Hit rate over the size of {name}", f"GB of {name}", lines))
    return plots


def _capacity_gb(run: Described, tier: str) -> float | None:
    config: Mapping[str, Any] = run["config"]
    num_pages = config["num_pages"][tier]
    return None if num_pages is None else num_pages * config["page_nbytes"] / 1e9


def _others(run: Described, runs: Sequence[Described], size_name: str) -> str:
    """Return what tells runs apart, but for the size of one tier."""
    words = label(run, runs).split(" ")
    return " ".join(word for word in words if not word.startswith(f"{size_name}=")) or "all tiers"
