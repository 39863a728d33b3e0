"""How fast pages move between L1 and L2 on a CPU, beside ``memcpy`` of the same pages.

``transfer.copy`` is of scattered pages of 2 MiB, about what an 8B model's 16 tokens take; other
pages have their size in their name. Copies and ``memcpy`` take turns, and rates are medians by the
processor time of all threads, which others on the machine disturb least: by wall clock, ``.wall``,
a copy also waits until its thread gets a core.
"""

import ctypes
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from random import Random
from statistics import median

import torch

from hicache.events import OpId
from hicache.layout import KVLayout
from hicache.pools import DevicePool, HostPool
from hicache.tools.report import Figures
from hicache.transfer import CpuTransfer

BAR = 0.85
BAR_FROM_KIB = 360
"""Smaller pages, if scattered, are held up by the calls: 64 KiB is copied in 6 us."""
PAGE_KIB = (64, 360, 1024, 2048, 8192)
MAIN_KIB = 2048
RUN_PAGES = {"": 1, ".runs": 8}


class Bench:
    """Two pools, and the same pages copied by a transfer and by ``memcpy``."""

    def __init__(self, page_kib: int, total_nbytes: int, run_pages: int) -> None:
        # One layer of one head: what a page holds makes no difference to its copy.
        layout = KVLayout(1, 1, page_kib * 1024 // 8, "float32", 1)
        num_pages = total_nbytes // layout.page_nbytes
        self.num_pages = num_pages
        self.nbytes = num_pages * layout.page_nbytes
        self.device = DevicePool(layout, 2 * num_pages)
        self.host = HostPool(layout, 2 * num_pages)
        self.source = _slots(num_pages, run_pages, seed=1)
        self.target = _slots(num_pages, run_pages, seed=2)
        self.transfer = CpuTransfer(self.device, self.host)
        self._next_op = 0

    def load(self) -> None:
        """Copy by a load, from asking for it to its arrival."""
        op = OpId(self._next_op)
        self._next_op += 1
        self.transfer.load(op, self.source, self.target)
        self.transfer.wait(op, 0)

    def memcpy(self) -> None:
        """Copy page by page."""
        nbytes = self.host.page_nbytes
        source, target = self.host.pages.data_ptr(), self.device.pages.data_ptr()
        for from_slot, to_slot in zip(self.source, self.target, strict=True):
            ctypes.memmove(target + to_slot * nbytes, source + from_slot * nbytes, nbytes)


def run(json_path: Path | None = None, *, is_quick: bool = False) -> int:
    """Measure loads, print the figures, and return the exit code."""
    total_nbytes = (32 << 20) if is_quick else (128 << 20)
    repetitions = 3 if is_quick else 20
    threads = torch.get_num_threads()
    figures = Figures(f"Loads of {total_nbytes >> 20} MiB from L2 to L1 ({threads} torch threads)")
    for page_kib in PAGE_KIB:
        for suffix, run_pages in RUN_PAGES.items():
            is_main = page_kib == MAIN_KIB and run_pages == 1
            name = "transfer.copy" if is_main else f"transfer.copy.{page_kib}KiB{suffix}"
            bench = Bench(page_kib, total_nbytes, run_pages)
            bar = BAR if page_kib >= BAR_FROM_KIB or run_pages > 1 else None
            _measure(figures, name, bench, repetitions, bar)
            if is_main:
                with _busy_python():
                    rates = [bench.nbytes / _seconds(bench.load)[0] / 1e9 for _ in range(3)]
                figures.add(f"{name}.busy.wall", median(rates), "GB/s")
            bench.transfer.close()
    return figures.report(json_path)


def _measure(
    figures: Figures, name: str, bench: Bench, repetitions: int, bar: float | None
) -> None:
    """Note the median of each; ``bar`` is what a copy must reach of ``memcpy``."""
    rates: dict[str, list[float]] = {"": [], ".memcpy": [], ".wall": []}
    for _ in range(repetitions):
        wall_s, processor_s = _seconds(bench.load)
        rates[""].append(bench.nbytes / processor_s / 1e9)
        rates[".wall"].append(bench.nbytes / wall_s / 1e9)
        rates[".memcpy"].append(bench.nbytes / _seconds(bench.memcpy)[1] / 1e9)
    limit = median(rates[".memcpy"])
    for suffix, values in rates.items():
        at_least = None if bar is None or suffix else bar * limit
        spread = min(values), max(values)
        figures.add(f"{name}{suffix}", median(values), "GB/s", at_least=at_least, spread=spread)
    figures.add(f"{name}.of_memcpy", median(rates[""]) / limit, "")


def _slots(count: int, run_pages: int, seed: int) -> "array[int]":
    """Return slots of a pool twice as large: runs of so many pages at random places."""
    starts = [start * run_pages for start in range(2 * count // run_pages)]
    Random(seed).shuffle(starts)
    runs = (range(start, start + run_pages) for start in starts)
    return array("i", list(chain.from_iterable(runs))[:count])


@contextmanager
def _busy_python() -> Iterator[None]:
    """Keep a thread busy in Python, as an engine between its kernels is."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return how long it took, and how much processor time of all threads."""
    start, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - processor
