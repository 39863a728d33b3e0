"""What the cache costs where it never helps: prompts of which no two begin alike.

The same load runs by turns on an engine with the cache, writing everything down to disk, and on
one whose requests have private pages. What the step thread spends in the cache's calls is
measured there, in processor time; wall clock and processor time of the whole process, which
include the copies and the writing in other threads, are printed beside it.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track

from hicache.config import Config, load
from hicache.engine.caching import OpenCache
from hicache.engine.engine import Engine
from hicache.engine.model import LoadedModel
from hicache.engine.opening import open_hicache
from hicache.engine.uncached import PrivatePages
from hicache.tools.prompts import Prompts
from hicache.tools.report import Figures
from hicache.tools.turns import greedy, take_turns

PAGE_SIZE = 16
AT_MOST = 0.005
OPENERS: dict[str, OpenCache] = {"on": open_hicache, "off": PrivatePages.open}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The load, and how often it runs."""

    num_prompts: int = 8
    prompt_tokens: int = 1024
    answer_tokens: int = 32
    num_rounds: int = 3


QUICK = Sizes(num_prompts=4, prompt_tokens=256, answer_tokens=8, num_rounds=1)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run of the load took, in seconds."""

    wall_s: float
    process_s: float
    """Processor time of all threads."""
    step_s: float
    """Wall clock of the steps."""
    step_thread_s: float
    """Processor time of the step thread in those steps."""
    cache_s: float
    """Processor time of the step thread in the cache's calls."""


def run(json_path: Path | None = None, *, is_quick: bool = False, model: str = "smollm2") -> int:
    """Measure, print the figures, and return the exit code."""
    sizes = QUICK if is_quick else Sizes()
    loaded: LoadedModel | None = None
    costs: dict[str, list[Cost]] = {name: [] for name in OPENERS}
    prompts: Prompts | None = None
    runs = [name for _ in range(sizes.num_rounds) for name in OPENERS]
    console = Console(stderr=True)
    for name in track(
        runs, "bench overhead", console=console, disable=not sys.stderr.isatty(), transient=True
    ):
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as path:
            config = settings(sizes, Path(path), model)
            with Engine(config, loaded, open_cache=OPENERS[name]) as engine:
                loaded = engine.model
                prompts = prompts or Prompts(loaded.encode)
                costs[name].append(measure(engine, sizes, prompts))
    return figures(sizes, costs).report(json_path)


def settings(sizes: Sizes, path: Path, model: str) -> Config:
    """Return settings with an L1 and an L2 that the load overflows, so that all parts have work."""
    num_pages = sizes.num_prompts * (sizes.prompt_tokens + sizes.answer_tokens) // PAGE_SIZE
    return load(
        environ={},
        overrides={
            "cache.page_size": PAGE_SIZE,
            "cache.device.size": f"{num_pages // 2}p",
            "cache.host.size": f"{num_pages // 2}p",
            "cache.storage.path": str(path),
            "cache.storage.size": "4GB",
            "engine.model": model,
            "engine.device": "cpu",
            "engine.dtype": "float32",
            "engine.num_threads": 1,
        },
    )


def measure(engine: Engine, sizes: Sizes, prompts: Prompts) -> Cost:
    """Run the load once, all requests at the same time."""
    asked = [prompts.take(sizes.prompt_tokens) for _ in range(sizes.num_prompts)]
    take_turns(engine, [prompts.take(PAGE_SIZE)], greedy(1))  # the first one is always slower
    before = engine.step_seconds, engine.counters.step_cpu_seconds, engine.cache_seconds
    wall, process = time.perf_counter(), time.process_time()
    turns = take_turns(engine, asked, greedy(sizes.answer_tokens))
    assert not any(turn.hit.total for turn in turns)
    return Cost(
        wall_s=time.perf_counter() - wall,
        process_s=time.process_time() - process,
        step_s=engine.step_seconds - before[0],
        step_thread_s=engine.counters.step_cpu_seconds - before[1],
        cache_s=engine.cache_seconds - before[2],
    )


def figures(sizes: Sizes, costs: dict[str, list[Cost]]) -> Figures:
    """Return the share of the cache, and the whole with it and without."""
    num_tokens = sizes.num_prompts * sizes.prompt_tokens
    found = Figures(f"What the cache costs at 0 % hits, {num_tokens:,} prompt tokens a run")
    # Of processor time: steps take longer where others are busy, and the share would look smaller.
    shares = [cost.cache_s / cost.step_thread_s for cost in costs["on"]]
    found.add(
        "overhead.fraction", median(shares), "", at_most=AT_MOST, spread=(min(shares), max(shares))
    )
    _add(found, "overhead.cache_calls", "s", costs["on"], lambda cost: cost.cache_s)
    _add(found, "overhead.steps.process", "s", costs["on"], lambda cost: cost.step_thread_s)
    _add(found, "overhead.steps.wall", "s", costs["on"], lambda cost: cost.step_s)
    for name, of_name in costs.items():
        _add(found, f"overhead.wall.cache_{name}", "s", of_name, lambda cost: cost.wall_s)
        _add(found, f"overhead.process.cache_{name}", "s", of_name, lambda cost: cost.process_s)
    return found


def _add(
    found: Figures, name: str, unit: str, costs: list[Cost], value: Callable[[Cost], float]
) -> None:
    values = [value(cost) for cost in costs]
    found.add(name, median(values), unit, spread=(min(values), max(values)))
