"""Section 4: the same prompt computed, and with its prefix in L1, in L2 and in L3.

Prompts are computed in chunks of a fixed size of which a prefix has a whole number, so the last
forward has the same shape wherever the prefix comes from: by the contract of the engine its
tokens are then equal, bit by bit, also in bfloat16. An answer ends before its page is full, so
that asking again hits the prefix and no more.
"""

import time
from array import array
from dataclasses import dataclass
from statistics import median

import torch

from hicache import machine
from hicache.engine.engine import Engine
from hicache.engine.model import LoadedModel
from hicache.events import OpId
from hicache.layout import KVLayout
from hicache.pools import CudaRegistrar, DevicePool, HostPool
from hicache.tools.gpucheck.findings import Report
from hicache.tools.gpucheck.model import RandomPrompts, ask, random_llama
from hicache.tools.gpucheck.opening import engine_of, storage_backend
from hicache.tools.gpucheck.running import Room
from hicache.tools.turns import Turn
from hicache.transfer import Transfer, open_transfer

_SETTLE_S = 0.3
"""In which back-ups end, so that a load is measured by itself."""

TIERS = ("computed", "device", "host", "storage")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the prompts are."""

    page_size: int
    chunk_tokens: int
    prefixes: tuple[int, ...]
    rounds: tuple[int, ...]
    """Repetitions of each."""
    ending_tokens: int
    answer_tokens: int


FULL = Sizes(64, 2048, (2048, 8192, 32768), (5, 3, 2), 48, 8)
SMALL = Sizes(16, 64, (128, 256), (1, 1), 8, 4)


def run(room: Room, report: Report) -> None:
    """Measure every tier at every length."""
    sizes = SMALL if room.is_small else FULL
    loaded = random_llama(room.device)
    report.note(f"attention by {loaded.attention}; L3 is {storage_backend()[1]}")
    times: dict[int, dict[str, float]] = {}
    for prefix_tokens, rounds in zip(sizes.prefixes, sizes.rounds, strict=True):
        if room.is_over:
            report.note(f"{prefix_tokens:,} tokens and more were left out: no time")
            break
        needed = 5 * loaded.layout_for(sizes.page_size).token_nbytes * prefix_tokens
        if needed > 0.7 * machine.available_nbytes():
            report.note(f"{prefix_tokens:,} tokens and more need {needed / 1e9:.0f} GB of memory")
            break
        times[prefix_tokens] = _measure(room, report, loaded, sizes, prefix_tokens, rounds)
        if {"device", "host"} <= times[prefix_tokens].keys():
            _hidden(room, report, loaded, sizes, prefix_tokens, times[prefix_tokens])
    for tier in ("host", "storage"):
        is_reloaded = any(tier in each for each in times.values())
        report.result(f"prefixes are reloaded that are {_where(tier)}", is_reloaded)
        _break_even(report, tier, times, sizes.page_size)


def _measure(
    room: Room, report: Report, loaded: LoadedModel, sizes: Sizes, prefix_tokens: int, rounds: int
) -> dict[str, float]:
    """Return the median time to the first token, by tier."""
    prompt_pages = (prefix_tokens + sizes.ending_tokens + sizes.answer_tokens) // sizes.page_size
    settings = {
        "cache.device.size": f"{prompt_pages + 2}p",  # one prompt pushes the other out
        "cache.host.size": f"{4 * prompt_pages + 64}p",
        "cache.storage.size": f"{16 * prompt_pages + 1024}p",
        "cache.storage.prefetch": "wait_complete",
        "engine.chunk_tokens": sizes.chunk_tokens,
        "engine.fixed_chunks": True,
    }
    taken: dict[str, list[float]] = {tier: [] for tier in TIERS}
    with engine_of(loaded, sizes.page_size, settings) as engine:
        prompts = RandomPrompts(loaded.vocab_size)
        length = prefix_tokens + sizes.ending_tokens
        ask(engine, prompts.take(length), sizes.answer_tokens)  # compiles what is to be compiled
        for _ in range(rounds):
            turns = _round(engine, prompts.take(length), prompts.take(length), sizes.answer_tokens)
            for tier in _check(report, turns, prefix_tokens):
                taken[tier].append(turns[tier].ttft_s)
            if room.is_over:
                break
    times = {tier: median(each) for tier, each in taken.items() if each}
    for tier, seconds in times.items():
        report.figure(f"first token of {length:,}, prefix {_where(tier)}", seconds * 1e3, "ms")
    return times


def _round(engine: Engine, prompt: list[int], other: list[int], num_tokens: int) -> dict[str, Turn]:
    """Ask for one prompt, with its prefix in each tier in turn."""
    turns = {"computed": ask(engine, prompt, num_tokens)}
    turns["device"] = ask(engine, prompt, num_tokens)
    ask(engine, other, num_tokens)  # which sends it to L2
    if engine.model.device.type == "cuda":
        time.sleep(_SETTLE_S)
    turns["host"] = ask(engine, prompt, num_tokens)
    engine.flush(60.0)  # which leaves it in L3 only
    turns["storage"] = ask(engine, prompt, num_tokens)
    return turns


def _check(report: Report, turns: dict[str, Turn], prefix_tokens: int) -> set[str]:
    """Check what came of a round; return the tiers that gave the whole prefix.

    The cache computes again what it takes to be faster to compute than to load.
    """
    computed = turns["computed"]
    whole = {"computed"}
    for tier in TIERS[1:]:
        turn = turns[tier]
        found = getattr(turn.hit, tier)
        name = f"{prefix_tokens:,} tokens, prefix {_where(tier)}"
        report.result(f"{name}: answered as computed", turn.token_ids == computed.token_ids)
        if turn.hit.total == prefix_tokens and 2 * found > prefix_tokens:
            whole.add(tier)
        else:
            report.note(f"{name}: only {found:,} tokens were reloaded")
    report.result(f"{prefix_tokens:,} tokens, prefix in L1: all found", "device" in whole)
    return whole


def _hidden(
    room: Room,
    report: Report,
    loaded: LoadedModel,
    sizes: Sizes,
    prefix_tokens: int,
    times: dict[str, float],
) -> None:
    """Say which share of a load from L2 is not seen in the time to the first token."""
    num_pages = prefix_tokens // sizes.page_size
    alone = _load_seconds(room, loaded.layout_for(sizes.page_size), num_pages)
    seen = max(0.0, times["host"] - times["device"])
    report.figure(f"load of {prefix_tokens:,} tokens alone", alone * 1e3, "ms")
    hidden = max(0.0, 1 - seen / alone)
    report.figure(f"share of that load hidden, {prefix_tokens:,} tokens", hidden * 100, "%")


def _load_seconds(room: Room, layout: KVLayout, num_pages: int) -> float:
    """Return how long pages take from L2 to L1 when nothing else runs: the least of three."""
    device = DevicePool(layout, num_pages, room.device)
    host = HostPool(layout, num_pages, CudaRegistrar() if device.is_cuda else None)
    transfer = open_transfer(device, host)
    slots = array("i", range(num_pages))
    taken: list[float] = []
    for number in range(3):
        transfer.load(OpId(number), slots, slots)
        taken.append(_wait_for(transfer))
    transfer.close()
    host.close()
    return min(taken)


def _wait_for(transfer: Transfer) -> float:
    """Return how long the copy took that is under way."""
    while not (finished := transfer.drain()):
        time.sleep(0.0001)
    seconds = finished[0].seconds
    assert seconds is not None, "a load failed"
    return seconds


def _break_even(
    report: Report, tier: str, times: dict[int, dict[str, float]], page_size: int
) -> None:
    """Say from which length on reloading is faster than computing, by straight lines."""
    measured = {length: each for length, each in times.items() if tier in each}
    if len(measured) < 2:
        return
    lengths = torch.tensor([float(length) for length in measured], dtype=torch.float64)
    saved = [each["computed"] - each[tier] for each in measured.values()]
    matrix = torch.stack([torch.ones_like(lengths), lengths], dim=1)
    wanted = torch.tensor(saved, dtype=torch.float64)[:, None]
    offset, slope = torch.linalg.lstsq(matrix, wanted).solution[:, 0].tolist()
    where = f"a prefix {_where(tier)}"
    if slope <= 0:
        num_faster = sum(seconds > 0 for seconds in saved)
        report.note(f"{where} is faster at {num_faster} of {len(saved)} lengths, without a trend")
        return
    length = max(float(page_size), -offset / slope)
    report.figure(f"break-even length, prefix {_where(tier)}", length, "tokens, by a fitted line")


def _where(tier: str) -> str:
    return {"computed": "nowhere", "device": "in L1", "host": "in L2", "storage": "in L3"}[tier]
