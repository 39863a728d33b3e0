"""Section 5: chats whose turns outgrow L1 four times, on one, two and three tiers."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from hicache.engine.completion import Completion
from hicache.engine.engine import Engine
from hicache.engine.generation import Generation
from hicache.tools.gpucheck.findings import Report
from hicache.tools.gpucheck.model import RandomPrompts, random_llama
from hicache.tools.gpucheck.opening import engine_of, storage_backend
from hicache.tools.gpucheck.running import Room
from hicache.tools.turns import Turn, greedy

TIERS = {"L1": "L1 only", "L1L2": "L1 + L2", "L1L2L3": "L1 + L2 + L3"}


@dataclass(frozen=True, slots=True)
class Load:
    """Who asks how much, how often."""

    page_size: int
    num_chats: int
    num_rounds: int
    system_tokens: int
    new_tokens: int
    answer_tokens: int

    @property
    def working_set_pages(self) -> int:
        """Pages of all chats at their end; the system prompt counts once."""
        each = self.num_rounds * (self.new_tokens + self.answer_tokens)
        return (self.system_tokens + self.num_chats * each) // self.page_size


FULL = Load(64, 8, 6, 1024, 1024, 16)
SMALL = Load(16, 8, 2, 32, 64, 4)


def run(room: Room, report: Report) -> None:
    """Run the same load on each server."""
    load = SMALL if room.is_small else FULL
    loaded = random_llama(room.device)
    report.note(
        f"{load.num_chats} chats of {load.num_rounds} turns; attention by {loaded.attention}"
    )
    report.note(f"L3 is {storage_backend()[1]}")
    all_pages = load.working_set_pages
    base_s = 0.0
    for tiers, title in TIERS.items():
        if room.is_over:
            report.note(f"{title} and more were left out: no time")
            return
        host = {"L1": "none", "L1L2": f"{all_pages + 64}p", "L1L2L3": f"{all_pages // 2}p"}[tiers]
        settings: dict[str, object] = {
            "cache.device.size": f"{all_pages // 4}p",
            "cache.host.size": host,
            "cache.storage.size": f"{8 * all_pages + 1024}p",
            "engine.chunk_tokens": 256 if room.is_small else 2048,
            "engine.max_batch": load.num_chats,
        }
        if tiers != "L1L2L3":
            settings["cache.storage.backend"] = "none"
        with engine_of(loaded, load.page_size, settings) as engine:
            started = time.monotonic()
            turns = list(_serve(engine, load, room))
            seconds = time.monotonic() - started
            computed = engine.counters.num_computed_tokens
        _figures(report, title, turns, seconds, computed)
        base_s = base_s or seconds / len(turns)
        report.figure(f"{title}: throughput, of L1 only", base_s / (seconds / len(turns)), "times")


def _serve(engine: Engine, load: Load, room: Room) -> Iterator[Turn]:
    """Run the load, turn by turn; yields the turns as they end, fewer where time runs out."""
    prompts = RandomPrompts(engine.model.vocab_size)
    system = prompts.take(load.system_tokens)
    params = greedy(load.answer_tokens)
    told = [system + prompts.take(load.new_tokens) for _ in range(load.num_chats)]
    asked: list[Generation] = [engine.submit(tokens, params) for tokens in told]
    for number in range(load.num_rounds):
        is_last = number + 1 == load.num_rounds or room.is_over
        for chat in range(load.num_chats):
            turn = Turn.of(Completion.of(asked[chat]))
            if not is_last:
                told[chat] += [*turn.token_ids, *prompts.take(load.new_tokens)]
                asked[chat] = engine.submit(told[chat], params)
            yield turn
        if is_last:
            return


def _figures(
    report: Report, title: str, turns: list[Turn], seconds: float, computed_tokens: int
) -> None:
    report.figure(f"{title}: requests", len(turns) / seconds, "1/s")
    report.figure(f"{title}: first token, median", median(t.ttft_s for t in turns) * 1e3, "ms")
    report.figure(f"{title}: prompt tokens computed", computed_tokens, "tokens")
    total = sum(turn.prompt_tokens for turn in turns)
    for tier in ("device", "host", "storage"):
        hit = sum(getattr(turn.hit, tier) for turn in turns)
        report.figure(f"{title}: hit in {tier}", 100 * hit / total, "% of prompt tokens")
    num_out = sum(len(turn.token_ids) for turn in turns)
    report.result(f"{title}: every turn has its answer", num_out > 0, f"{num_out:,} tokens")
