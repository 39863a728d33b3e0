"""How soon a prompt is answered whose tokens are in L1, in L2, in L3, or nowhere.

In each round a new prefix is computed, and with the one before it moves between the tiers: a flush
leaves them in L3 only, a request for the one sends the other from L1 to L2. Every request has an
ending of its own, so that it hits the prefix and no more. Times are compared within a round, and
the median of the rounds counts: a machine that is busy for a while is so for both.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

from hicache.actions import HitTokens
from hicache.config import Config, load
from hicache.engine.engine import Engine
from hicache.engine.uncached import PrivatePages
from hicache.errors import HiCacheError
from hicache.tools.prompts import Prompts
from hicache.tools.report import Figures
from hicache.tools.turns import Turn, greedy, take_turn

PAGE_SIZE = 16
ANSWER_TOKENS = 4
FASTER_THAN_COMPUTING = 10.0
SLOWER_THAN_L1 = 1.10
TIERS = ("none", "device", "host", "storage")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how often."""

    prefix_tokens: int = 1888
    ending_tokens: int = 112
    num_rounds: int = 7
    host_pages: int = 2304
    """Fetches use at most 1/16 of L2 at once: a batch of 128 pages fits."""


QUICK = Sizes(prefix_tokens=480, ending_tokens=32, num_rounds=2, host_pages=512)


@dataclass(slots=True)
class Measured:
    """Requests that went as planned, by the tier of their prefix, and those that did not."""

    rounds: list[dict[str, list[float]]] = field(default_factory=list)
    """Times to first token, by tier."""
    to_verify: dict[str, tuple[list[int], Turn]] = field(default_factory=dict)
    """One request of each tier."""
    num_not_whole: int = 0
    """Requests that did not wait for the whole prefix."""

    def times(self, tier: str) -> list[float]:
        """Return the times of all rounds."""
        return [time for round_ in self.rounds for time in round_.get(tier, ())]

    def ratio(self, tier: str, other: str) -> tuple[float, float, float]:
        """Return how many times as long a tier took as another: median, least, most."""
        ratios = [
            median(round_[tier]) / median(round_[other])
            for round_ in self.rounds
            if tier in round_ and other in round_
        ]
        return median(ratios), min(ratios), max(ratios)


def run(json_path: Path | None = None, *, is_quick: bool = False, model: str = "smollm2") -> int:
    """Measure, print the figures, and return the exit code."""
    sizes = QUICK if is_quick else Sizes()
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as path:
        config = settings(sizes, Path(path), model)
        measured = Measured()
        with Engine(config) as engine:
            loaded = engine.model
            for _ in _shown(measure(engine, sizes, measured), num_requests(sizes)):
                pass
        verify(Engine(config, loaded, open_cache=PrivatePages.open), measured)
    return figures(sizes, measured).report(json_path)


def settings(sizes: Sizes, path: Path, model: str) -> Config:
    """Return settings with an L1 of one prompt, and an L2 and L3 of many."""
    prompt_tokens = sizes.prefix_tokens + sizes.ending_tokens + ANSWER_TOKENS
    return load(
        environ={},
        overrides={
            "cache.page_size": PAGE_SIZE,
            "cache.device.size": f"{prompt_tokens // PAGE_SIZE + 8}p",
            "cache.host.size": f"{sizes.host_pages}p",
            "cache.storage.path": str(path),
            "cache.storage.size": "8GB",
            "engine.model": model,
            "engine.device": "cpu",
            "engine.dtype": "float32",
            "engine.num_threads": 1,
        },
    )


def num_requests(sizes: Sizes) -> int:
    """Return how many steps ``measure`` has."""
    return 1 + 6 * sizes.num_rounds


def measure(engine: Engine, sizes: Sizes, measured: Measured) -> Iterator[None]:
    """Run all requests; yields after each."""
    prompts = Prompts(engine.model.encode)

    def ask(tier: str, prefix: list[int]) -> None:
        prompt = prefix + prompts.take(sizes.ending_tokens)
        turn = take_turn(engine, prompt, greedy(ANSWER_TOKENS))
        if tier == _tier(turn.hit, sizes.prefix_tokens):
            measured.rounds[-1].setdefault(tier, []).append(turn.ttft_s)
            measured.to_verify[tier] = (prompt, turn)
        else:
            measured.num_not_whole += 1

    other = prompts.take(sizes.prefix_tokens)
    take_turn(engine, other, greedy(ANSWER_TOKENS))
    yield
    for _ in range(sizes.num_rounds):
        prefix = prompts.take(sizes.prefix_tokens)
        measured.rounds.append({})
        ask("none", prefix)
        yield
        engine.flush(60.0)
        for tier, wanted in (
            ("storage", other),
            ("device", other),
            ("storage", prefix),
            ("device", prefix),
            ("host", other),
        ):
            ask(tier, wanted)
            yield
        other = prefix


def verify(engine: Engine, measured: Measured) -> None:
    """Compute one prompt of each tier without a cache; raise if another token comes out."""
    with engine:
        for tier, (prompt, turn) in measured.to_verify.items():
            if tier != "none":
                computed = take_turn(engine, prompt, greedy(ANSWER_TOKENS))
                if computed.token_ids != turn.token_ids:
                    raise HiCacheError(f"a prompt with its prefix in {tier} was answered wrongly")


def figures(sizes: Sizes, measured: Measured) -> Figures:
    """Return times, and what they are to each other."""
    total = sizes.prefix_tokens + sizes.ending_tokens
    found = Figures(
        f"Time to first token of {total:,} tokens, {sizes.prefix_tokens:,} of them in a tier"
    )
    for tier in TIERS:
        times = measured.times(tier)
        if not times:
            raise HiCacheError(f"no request found its whole prefix in {tier}: is the machine busy?")
        found.add(f"reuse.ttft.{tier}", median(times), "s", spread=(min(times), max(times)))
    is_full = sizes == Sizes()
    for tier in TIERS[1:]:
        ratio, *spread = measured.ratio("none", tier)
        bar = FASTER_THAN_COMPUTING if is_full and tier == "storage" else None
        found.add(f"reuse.none_of_{tier}", ratio, "", at_least=bar, spread=(spread[0], spread[1]))
    ratio, *spread = measured.ratio("storage", "device")
    bar = SLOWER_THAN_L1 if is_full else None
    found.add("reuse.storage_of_device", ratio, "", at_most=bar, spread=(spread[0], spread[1]))
    found.add("reuse.not_waited_for", measured.num_not_whole, "requests")
    return found


def _tier(hit: HitTokens, num_tokens: int) -> str:
    """Return the tier that had to be reached for a hit of so many tokens; else a word for none."""
    if hit.total == 0:
        return "none"
    if hit.total != num_tokens:
        return "a part"
    if hit.storage > num_tokens // 2:
        return "storage"
    return "host" if hit.host > num_tokens // 2 else "device"


def _shown(steps: Iterator[None], total: int) -> Iterator[None]:
    """Show how far the steps are, on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("bench reuse", total=total)
        for step in steps:
            bar.advance(task)
            yield step
