"""A report as one HTML file that needs nothing else: tables, and plots as inline SVG."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hicache.errors import InputError
from hicache.tools.replay.explaining import REASONS
from hicache.tools.replay.plots import COLOURS, Bars, Line, Plot
from hicache.tools.replay.tables import Described, label, nbytes_text, seconds_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em;
  color: #222; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; margin: 0.6em 0; font-size: 0.87em; }
th, td { padding: 0.25em 0.55em; text-align: right; border-bottom: 1px solid #ddd;
  white-space: nowrap; }
th { border-bottom: 2px solid #999; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td.text { text-align: left; white-space: normal; }
.note { color: #555; font-size: 0.9em; } .wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; margin: 0.5em 0; }
"""

_TIERS = {"device": "L1", "host": "L2", "storage": "L3"}
_TIER_COLOURS = dict(zip(_TIERS, ("#0072b2", "#56b4e9", "#009e73"), strict=True))
_MISS_COLOURS = ("#d55e00", "#e69f00", "#cc79a7", "#7570b3", "#8c6d31", "#882255", "#ddcc77")
_NEVER_SEEN = "#bbbbbb"

MAX_BARS = 40
MAX_OVER_TIME = 12
"""Runs whose hit rate over time is drawn."""
MAX_BY_TIER = 8
"""Choices whose hit rate by tier over a size is drawn."""


def write_page(path: Path, trace: Described, runs: Sequence[Described]) -> None:
    """Write the page; raise ``InputError`` if that fails."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>hicache replay: {escape(str(trace['file']))}</title><style>{_STYLE}</style>",
        *_header(trace, runs),
        "<h2>Hit rate, time and wear</h2>",
        _summary(runs),
        "<h2>Where pages came from, and why they were missed</h2>",
        _bars(runs).svg(),
        _reasons(runs),
        *_over_sizes(runs),
        "<h2>Hit rate over time</h2>",
        *(_over_time(run, runs).svg() for run in runs[:MAX_OVER_TIME]),
        *_left_out(len(runs), MAX_OVER_TIME),
        "<h2>Bytes moved, and pages that left</h2>",
        _moved(runs),
        *_footer(trace, runs),
        "</html>",
    ]
    try:
        path.write_text("\n".join(parts) + "\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _header(trace: Described, runs: Sequence[Described]) -> Iterator[str]:
    yield f"<h1>{escape(str(trace['file']))}</h1>"
    yield (
        f"<p>{escape(str(trace['format']))}: {trace['num_requests']:,} requests of "
        f"{trace['num_sessions']:,} sessions, {trace['num_input_tokens']:,} prompt tokens; "
        f"{trace['num_unique_pages']:,} different pages of {trace['num_pages']:,} referred to. "
        f"Arrival: {escape(str(trace['pace']))}. What was generated is "
        f"{'kept, too' if trace['has_outputs'] else 'not kept'}.</p>"
    )
    if trace["note"]:
        yield f"<p class=note>{escape(str(trace['note']))}</p>"
    best = max(runs, key=lambda run: float(run["hit_rate"]["blocks"]["total"]))
    total, infinite = best["hit_rate"]["blocks"]["total"], best["optimum"]["infinite"]
    what = f"{100 * total:.2f} %"
    if len(runs) > 1:
        what += f" with {escape(label(best, runs))}, the best of {len(runs)} runs"
    share = f", {100 * total / infinite:.0f} % of the optimum" if infinite else ""
    yield f"<p><b>Hit rate, blocks: {what}{share}</b> (an infinite cache: {100 * infinite:.2f} %)"


def _summary(runs: Sequence[Described]) -> str:
    tiers, has_min = _tiers(runs), any(run["optimum"]["min"] is not None for run in runs)
    has_times = any(run["config"]["prefill_tokens_per_s"] for run in runs)
    names = ["run", *(f"{name} %" for name in tiers.values()), "blocks %", "tokens %", "infinite %"]
    names += ["MIN %"] * has_min + ["TTFT p50", "p90", "p99"] * has_times + ["stored B/token"]
    rows = []
    for run in runs:
        blocks, optimum = run["hit_rate"]["blocks"], run["optimum"]
        shares = [blocks[tier] for tier in (*tiers, "total")]
        shares += [run["hit_rate"]["tokens"]["total"], optimum["infinite"]]
        shares += [optimum["min"]] * has_min
        cells = [label(run, runs)]
        cells += ["" if share is None else f"{100 * share:.2f}" for share in shares]
        cells += [seconds_text(run, name) for name in ("p50", "p90", "p99") if has_times]
        rows.append([*cells, f"{run['storage_bytes_per_prompt_token']:,.0f}"])
    return _table(names, rows)


def _bars(runs: Sequence[Described]) -> Bars:
    shown = runs[:MAX_BARS]
    reasons = dict.fromkeys(name for run in shown for name in run["misses"])
    reasons.pop("never_seen", None)
    tiers = _tiers(runs)
    parts = [(f"hit in {name}", _TIER_COLOURS[tier]) for tier, name in tiers.items()]
    for number, name in enumerate(reasons):
        parts.append((f"missed: {name}", _MISS_COLOURS[number % len(_MISS_COLOURS)]))
    parts.append(("missed: never_seen", _NEVER_SEEN))
    rows = []
    for run in shown:
        num_pages = run["pages"]["referred"]
        shares = [run["hit_rate"]["blocks"][tier] for tier in tiers]
        shares += [run["misses"].get(name, 0) / num_pages for name in (*reasons, "never_seen")]
        rows.append((label(run, runs), shares))
    return Bars("Of all pages referred to", rows, parts)


def _reasons(runs: Sequence[Described]) -> str:
    names = dict.fromkeys(name for run in runs for name in run["misses"])
    items = [f"<li><b>{name}</b>: {escape(REASONS.get(str(name), str(name)))}" for name in names]
    return f"<ul class=note>{''.join(items)}</ul>"


# ---------------------------------------------------------------- over a size


def _over_sizes(runs: Sequence[Described]) -> Iterator[str]:
    """Plots for each tier whose size varies: a line for each choice of everything else."""
    for tier, name in _TIERS.items():
        sized = [(size, run) for run in runs if (size := _size_gb(run, tier)) is not None]
        if len({size for size, _ in sized}) < 2:
            continue
        choices: dict[str, list[tuple[float, Described]]] = {}
        for size, run in sorted(sized, key=lambda pair: pair[0]):
            choices.setdefault(_others(run, runs, name.lower()), []).append((size, run))
        ticks = [(size, f"{size:,.4g}") for size in sorted({size for size, _ in sized})]
        yield f"<h2>Over the size of {name}</h2>"
        yield _total_over(choices, ticks, name).svg()
        if any(run["config"]["prefill_tokens_per_s"] for run in runs):
            yield _ttft_over(choices, ticks, name).svg()
        for choice, points in list(choices.items())[:MAX_BY_TIER]:
            yield _tiers_over(choice, points, ticks, name).svg()
        yield from _left_out(len(choices), MAX_BY_TIER)


Choices = Mapping[str, Sequence[tuple[float, Described]]]
Ticks = Sequence[tuple[float, str]]


def _total_over(choices: Choices, ticks: Ticks, name: str) -> Plot:
    lines = [
        Line(choice, [(size, run["hit_rate"]["blocks"]["total"]) for size, run in points])
        for choice, points in choices.items()
    ]
    least: dict[float, float] = {}
    for points in choices.values():
        for size, run in points:
            if run["optimum"]["min"] is not None:
                least[size] = max(run["optimum"]["min"], least.get(size, 0.0))
    if least:
        lines.append(Line("MIN (Belady)", sorted(least.items()), True, "#555555"))
    (_, first), *_ = next(iter(choices.values()))
    infinite = first["optimum"]["infinite"]
    ends = [(ticks[0][0], infinite), (ticks[-1][0], infinite)]
    lines.append(Line("infinite cache", ends, True, "#999999"))
    return Plot(f"Hit rate in blocks, all tiers, over {name}", f"GB of {name}", lines,
                x_ticks=ticks)  # fmt: skip


def _tiers_over(
    choice: str, points: Sequence[tuple[float, Described]], ticks: Ticks, name: str
) -> Plot:
    lines = [
        Line(
            f"hit in {shown}", [(size, run["hit_rate"]["blocks"][tier]) for size, run in points],
            colour=_TIER_COLOURS[tier],
        )
        for tier, shown in _tiers([run for _, run in points]).items()
    ]  # fmt: skip
    title = f"Hit rate by tier over {name}: {choice}"
    return Plot(title, f"GB of {name}", lines, is_stacked=True, x_ticks=ticks)


def _ttft_over(choices: Choices, ticks: Ticks, name: str) -> Plot:
    lines: list[Line] = []
    for number, (choice, points) in enumerate(choices.items()):
        colour = COLOURS[number % len(COLOURS)]
        for percentile, is_dashed in (("p50", True), ("p99", False)):
            values = [(size, run["ttft_s"][percentile]) for size, run in points]
            lines.append(Line(f"{percentile}, {choice}", values, is_dashed, colour))
    return Plot(f"Time to first token over {name}", f"GB of {name}", lines, x_ticks=ticks,
                y_text=lambda value: f"{value:.3g} s", y_max=None)  # fmt: skip


def _size_gb(run: Described, tier: str) -> float | None:
    config: Mapping[str, Any] = run["config"]
    text = str(config[_TIERS[tier].lower()])
    if text.endswith("GB"):
        return float(text.removesuffix("GB"))  # as it was asked for, not cut to whole pages
    num_pages = config["num_pages"][tier]
    return num_pages * config["page_nbytes"] / 1e9 if num_pages else None


def _others(run: Described, runs: Sequence[Described], size_name: str) -> str:
    """Return what tells runs apart, but for the size of one tier."""
    words = label(run, runs).split(" ")
    return " ".join(word for word in words if not word.startswith(f"{size_name}=")) or "all runs"


# ---------------------------------------------------------------- over time


def _over_time(run: Described, runs: Sequence[Described]) -> Plot:
    points = run["over_time"]
    last = max((point["time_s"] for point in points), default=0.0)
    unit, seconds = next(
        (unit, seconds) for unit, seconds in (("seconds", 1), ("minutes", 60), ("hours", 3600))
        if last < 300 * seconds or unit == "hours"
    )  # fmt: skip
    lines = [
        Line(
            f"hit in {name}", [(point["time_s"] / seconds, point[tier]) for point in points],
            colour=_TIER_COLOURS[tier],
        )
        for tier, name in _tiers([run]).items()
    ]  # fmt: skip
    optimum = [(point["time_s"] / seconds, point["infinite"]) for point in points]
    lines.append(Line("infinite cache", optimum, True, "#555555"))
    return Plot(f"Hit rate by tier over time: {label(run, runs)}", unit, lines, is_stacked=True)


# ---------------------------------------------------------------- tables


def _moved(runs: Sequence[Described]) -> str:
    hops = {"host_to_device": "L2 → L1", "device_to_host": "L1 → L2",
            "storage_to_host": "L3 → L2", "host_to_storage": "L2 → L3"}  # fmt: skip
    left = dict.fromkeys(
        (tier, reason)
        for run in runs for tier in _TIERS for reason in run["evicted_pages"][tier]
    )  # fmt: skip
    rows = [
        [
            label(run, runs),
            *(nbytes_text(run["bytes"][hop]) for hop in hops),
            *(f"{run['evicted_pages'][tier].get(reason, 0):,}" for tier, reason in left),
            f"{run['num_refused_requests']:,}",
        ]
        for run in runs
    ]
    names = [f"{_TIERS[tier]}: {reason.replace('_', ' ')}" for tier, reason in left]
    return _table(["run", *hops.values(), *names, "requests refused"], rows)


def _footer(trace: Described, runs: Sequence[Described]) -> Iterator[str]:
    yield "<h2>What was replayed</h2><table>"
    for name, value in runs[0]["config"].items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {_of_mapping(item)}" for key, item in value.items())
        values = {str(run["config"][name]) for run in runs}
        shown = str(value) if len(values) == 1 else "varies"
        yield f"<tr><td>{name}<td class=text>{escape(shown)}"
    yield "</table><h2>What the rates are of</h2><ul class=note>"
    for name, text in trace["denominators"].items():
        yield f"<li><b>{name}</b>: {escape(text)}"
    yield "</ul>"


def _of_mapping(value: object) -> str:
    if isinstance(value, Mapping):  # a hop
        rate = value["nbytes_per_s"]
        speed = "any rate" if rate is None else f"{rate / 1e9:g} GB/s"
        return f"{speed} + {value['latency_s'] * 1e6:g} µs"
    return "without end" if value is None else f"{value:,}"


def _tiers(runs: Sequence[Described]) -> dict[str, str]:
    """Return the tiers that any run has, by their names."""
    return {
        tier: name for tier, name in _TIERS.items()
        if any(run["config"]["num_pages"][tier] != 0 for run in runs)
    }  # fmt: skip


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}" for name in names)
    body = ["<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows]
    return "\n".join([f"<div class=wide><table><tr>{head}", *body, "</table></div>"])


def _left_out(number: int, limit: int) -> Iterator[str]:
    if number > limit:
        yield f"<p class=note>{number - limit} more are in the tables.</p>"
