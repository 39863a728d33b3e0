"""Many chats whose turns outgrow L1, on the same server with L1 alone, with L2, and with L3.

Eight chats share a system prompt and take turns, each with one request at a time: when a chat has
its answer, it asks again, behind the others. By the time its turn comes, L1, which holds a
quarter of all, has room for it no more. With L3, L2 holds only half of all, so that both are used.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

from hicache.config import Config, load
from hicache.engine.completion import Completion
from hicache.engine.engine import Engine
from hicache.engine.generation import Generation
from hicache.engine.model import LoadedModel
from hicache.tools.prompts import Prompts
from hicache.tools.report import Figures
from hicache.tools.turns import Turn, greedy

PAGE_SIZE = 16
TIERS = {"l1": "L1 only", "l1l2": "L1 + L2", "l1l2l3": "L1 + L2 + L3"}
THROUGHPUT_AT_LEAST = 4.0
TTFT_AT_MOST = 0.25
COMPUTED_AT_MOST = 0.15


@dataclass(frozen=True, slots=True)
class Load:
    """Who asks how much, how often."""

    num_chats: int = 8
    num_rounds: int = 24
    system_tokens: int = 512
    new_tokens: int = 64
    answer_tokens: int = 8

    @property
    def working_set_pages(self) -> int:
        """Pages of all chats at their end; the system prompt counts once."""
        each = self.num_rounds * (self.new_tokens + self.answer_tokens)
        return (self.system_tokens + self.num_chats * each) // PAGE_SIZE

    @property
    def num_requests(self) -> int:
        """Requests of all chats."""
        return self.num_chats * self.num_rounds


QUICK = Load(num_rounds=8)


@dataclass(frozen=True, slots=True)
class Served:
    """What one server made of the load."""

    turns: list[Turn]
    seconds: float
    computed_tokens: int
    """Prompt tokens, those computed again after a preemption included."""
    num_preemptions: int

    @property
    def requests_per_s(self) -> float:
        """Throughput."""
        return len(self.turns) / self.seconds

    @property
    def ttft_p50_s(self) -> float:
        """Median time from a request to its first token, its wait for others included."""
        return median(turn.ttft_s for turn in self.turns)


def run(
    json_path: Path | None = None,
    *,
    is_quick: bool = False,
    model: str = "smollm2",
    chats: Load | None = None,
) -> int:
    """Measure, print the figures, and return the exit code. ``chats`` replaces the load."""
    chats = chats or (QUICK if is_quick else Load())
    served: dict[str, Served] = {}
    loaded: LoadedModel | None = None
    console = Console(stderr=True)
    with Progress(console=console, disable=not sys.stderr.isatty(), transient=True) as bar:
        for tiers, title in TIERS.items():
            task = bar.add_task(f"bench chat, {title}", total=chats.num_requests)
            with (
                tempfile.TemporaryDirectory(prefix="hicache-bench-") as path,
                Engine(settings(chats, tiers, Path(path), model), loaded) as engine,
            ):
                loaded = engine.model
                turns: list[Turn] = []
                started = time.monotonic()
                for turn in serve(engine, chats):
                    turns.append(turn)
                    bar.advance(task)
                served[tiers] = Served(
                    turns,
                    time.monotonic() - started,
                    engine.counters.num_computed_tokens,
                    engine.counters.num_preemptions,
                )
    return figures(chats, served, has_bars=chats == Load()).report(json_path)


def settings(chats: Load, tiers: str, path: Path, model: str) -> Config:
    """Return settings of a server with these tiers."""
    all_pages = chats.working_set_pages
    host = {"l1": "none", "l1l2": f"{all_pages}p", "l1l2l3": f"{all_pages // 2}p"}[tiers]
    return load(
        environ={},
        overrides={
            "cache.page_size": PAGE_SIZE,
            "cache.device.size": f"{all_pages // 4}p",
            "cache.host.size": host,
            "cache.storage.backend": "lmdb" if tiers == "l1l2l3" else "none",
            "cache.storage.path": str(path),
            "cache.storage.size": "4GB",
            "engine.model": model,
            "engine.device": "cpu",
            "engine.dtype": "float32",
            "engine.num_threads": 1,
            # Turn by turn: longest prefix first would let those go on that are in L1.
            "engine.schedule": "fcfs",
        },
    )


def serve(engine: Engine, chats: Load) -> Iterator[Turn]:
    """Run the load; yields the turns as they end."""
    prompts = Prompts(engine.model.encode)
    system = prompts.take(chats.system_tokens)
    params = greedy(chats.answer_tokens)
    told = [system + prompts.take(chats.new_tokens) for _ in range(chats.num_chats)]
    asked: list[Generation] = [engine.submit(tokens, params) for tokens in told]
    for number in range(chats.num_rounds):
        for chat in range(chats.num_chats):
            turn = Turn.of(Completion.of(asked[chat]))
            if number + 1 < chats.num_rounds:
                told[chat] += [*turn.token_ids, *prompts.take(chats.new_tokens)]
                asked[chat] = engine.submit(told[chat], params)
            yield turn


def figures(chats: Load, served: dict[str, Served], *, has_bars: bool) -> Figures:
    """Return what each server did, and what more tiers gain."""
    found = Figures(
        f"{chats.num_chats} chats of {chats.num_rounds} turns, "
        f"L1 a quarter of {chats.working_set_pages * PAGE_SIZE:,} tokens"
    )
    for tiers, of_tiers in served.items():
        found.add(f"chat.{tiers}.requests_per_s", of_tiers.requests_per_s, "1/s")
        found.add(f"chat.{tiers}.ttft_p50_s", of_tiers.ttft_p50_s, "s")
        found.add(f"chat.{tiers}.computed_tokens", of_tiers.computed_tokens, "tokens")
        for tier in ("device", "host", "storage"):
            hit = sum(getattr(turn.hit, tier) for turn in of_tiers.turns)
            found.add(f"chat.{tiers}.hit_tokens.{tier}", hit, "tokens")
        found.add(f"chat.{tiers}.preemptions", of_tiers.num_preemptions, "times")
    base = served["l1"]
    for tiers in ("l1l2", "l1l2l3"):
        faster = served[tiers].requests_per_s / base.requests_per_s
        ttft = served[tiers].ttft_p50_s / base.ttft_p50_s
        computed = served[tiers].computed_tokens / base.computed_tokens
        name = f"chat.{tiers}.of_l1"
        at_least = THROUGHPUT_AT_LEAST if has_bars else None
        found.add(f"{name}.throughput", faster, "x", at_least=at_least)
        found.add(f"{name}.ttft_p50", ttft, "", at_most=TTFT_AT_MOST if has_bars else None)
        found.add(
            f"{name}.computed_tokens", computed, "", at_most=COMPUTED_AT_MOST if has_bars else None
        )
    pairs = zip(base.turns, served["l1l2l3"].turns, strict=True)
    found.add("chat.other_answers", sum(a.token_ids != b.token_ids for a, b in pairs), "turns")
    return found
