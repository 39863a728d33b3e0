"""Section 6: whether memory comes back: of the device, pinned, and of the process."""

import gc
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hicache.engine.model import LoadedModel
from hicache.pools import CudaRegistrar
from hicache.tools.gpucheck.copies import Pools, check_bytes
from hicache.tools.gpucheck.findings import Report
from hicache.tools.gpucheck.model import RandomPrompts, ask, random_llama
from hicache.tools.gpucheck.opening import engine_of
from hicache.tools.gpucheck.running import Room

_ROUNDS = 3
_SMALL_ROUNDS = 1
_MOST_GROWTH_NBYTES = 64 << 20
"""Of memory that others have a part in: the driver, the allocators, the interpreter."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is in use."""

    by_torch: int
    """Of the device, by torch: exact."""
    device: int
    """Of the device, by everybody."""
    registered: int
    """Pinned by us and not given back."""
    resident: int
    """Of this process."""


def run(room: Room, report: Report) -> None:
    """Open, use and close pools, and an engine, again and again."""
    _repeat(room, report, "pools and copies", partial(_use_pools, room, report))
    loaded = random_llama(room.device, is_tiny=True)  # it is the cache that is looked at
    _repeat(room, report, "an engine", partial(_use_engine, loaded))


def _use_pools(room: Room, report: Report) -> None:
    pools = Pools.open(room, 64 << 10, nbytes=256 << 20)
    try:
        check_bytes(pools, report, "64 KiB a page, once more")
    finally:
        pools.close()


def _use_engine(loaded: LoadedModel) -> None:
    settings: dict[str, object] = {
        "cache.device.size": "32p",
        "cache.host.size": "128p",
        "cache.storage.size": "64MB",
    }
    with engine_of(loaded, 16, settings) as engine:
        prompts = RandomPrompts(loaded.vocab_size)
        for _ in range(4):
            ask(engine, prompts.take(200), 4)
        engine.flush(30.0)
        stats = engine.cache.stats()
    assert stats is not None
    assert stats.num_operations == 0, f"{stats.num_operations} operations are not over"
    assert stats.num_used_pages["device"] == 0, "L1 is not empty after a flush"


def _repeat(room: Room, report: Report, name: str, use: Callable[[], None]) -> None:
    """Use something, which may set things up for good, and then look whether it grows."""
    for _ in range(1 if room.is_small else 2):
        use()
    before = _memory(room)
    rounds = _SMALL_ROUNDS if room.is_small else _ROUNDS
    for _ in range(rounds):
        use()
    after = _memory(room)
    report.result(
        f"{name}: pinned memory is given back",
        after.registered == 0,
        f"{after.registered / 1e6:,.1f} MB are left",
    )
    most = _MOST_GROWTH_NBYTES
    for what, grown, allowed in (
        ("device memory of torch", after.by_torch - before.by_torch, 0),
        ("device memory of all", after.device - before.device, most),
        ("memory of the process", after.resident - before.resident, most),
    ):
        detail = f"{grown / 1e6:+,.1f} MB in {rounds} rounds"
        report.result(f"{name}: {what} does not grow", grown <= allowed, detail)


def _memory(room: Room) -> Memory:
    gc.collect()
    by_torch = device = 0
    if not room.is_small:
        torch.cuda.synchronize(room.device)
        torch.cuda.empty_cache()
        by_torch = torch.cuda.memory_allocated(room.device)
        free, total = torch.cuda.mem_get_info(room.device)
        device = total - free
    return Memory(by_torch, device, CudaRegistrar.pinned_nbytes(), _resident_nbytes())


def _resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
