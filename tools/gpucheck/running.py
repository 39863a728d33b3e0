"""Runs sections: each in a process of its own, within its time, whatever becomes of it.

A GPU that has failed once fails everything else in that process, and a kernel that hangs cannot
be stopped from within it.
"""

import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from hicache.tools.gpucheck.findings import Report

logger = logging.getLogger("hicache.gpucheck")

SECTIONS: dict[str, float] = {
    "here": 22.0,
    "attention": 120.0,
    "copies": 78.0,
    "tiers": 120.0,
    "chats": 95.0,
    "leaks": 40.0,
}
"""Seconds that each may take, in the order in which they run: 475 in all. Most stop in good time
by themselves (``Room.is_over``) and say what they left out."""

_LEFT_FOR_THE_END = 0.8
"""Share of its time after which a section begins nothing new."""

_MARK = "gpucheck-report:"

CHILD = (sys.executable, "-m", "hicache.tools.gpucheck.child")
"""Followed by a section and a device."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a section may use."""

    device: str
    ends_at: float
    """After this nothing new should be begun."""
    killed_at: float

    @property
    def is_small(self) -> bool:
        """Whether this is a dry run on a CPU."""
        return self.device == "cpu"

    @property
    def is_over(self) -> bool:
        """Whether nothing new should be begun."""
        return time.monotonic() > self.ends_at

    def has(self, seconds: float) -> bool:
        """Whether something may be begun that takes so long."""
        return time.monotonic() + seconds < self.killed_at


Section = Callable[[Room, Report], None]


def why_not(device: str) -> str | None:
    """Return what keeps every section from running; ``None`` if nothing does."""
    for name in ("torch", "numpy", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    if device == "cpu":
        return None
    import torch

    try:
        index = torch.device(device).index or 0
    except RuntimeError:
        return f"{device!r} is no device: cuda, cuda:1, … or cpu"
    if not torch.cuda.is_available():
        return "there is no CUDA device here; --device cpu is a dry run of every section"
    return None if index < torch.cuda.device_count() else f"there is no {device} here"


def run_here(name: str, device: str, report_type: type[Report] = Report) -> Report:
    """Run a section in this process. An exception is its end, and is reported."""
    from hicache.tools.gpucheck import standins

    report = report_type(name, SECTIONS[name])
    started = time.monotonic()
    budget_s = SECTIONS[name]
    room = Room(device, started + budget_s * _LEFT_FOR_THE_END, started + budget_s)
    try:
        replaced = standins.install()
        module = importlib.import_module(f"hicache.tools.gpucheck.{name}")
        if replaced and name != "here":
            report.note(f"not installed, and stood in for: {', '.join(replaced)}")
        cast(Section, module.run)(room, report)
    except Exception as error:
        logger.exception("a section died")
        report.status = "died"
        report.why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    report.seconds = time.monotonic() - started
    return report


class ToldReport(Report):
    """A report that is told whenever it grows, for a process that may be killed."""

    __slots__ = ()

    def result(self, name: str, is_right: bool, detail: str = "") -> None:
        """Note whether something is right."""
        super().result(name, is_right, detail)
        tell(self)

    def figure(self, name: str, value: float, unit: str) -> None:
        """Note a measured value."""
        super().figure(name, value, unit)
        tell(self)

    def note(self, text: str) -> None:
        """Note what a reader must know."""
        super().note(text)
        tell(self)


def tell(report: Report) -> None:
    """Hand a report over to the process that ran this one."""
    print(f"{_MARK}{report.written()}", flush=True)


def run_apart(
    name: str, device: str, command: Sequence[str] = CHILD, budget_s: float | None = None
) -> Report:
    """Run a section in a process of its own, and end that when its time is over.

    ``command`` and ``budget_s`` are replaced by tests.
    """
    budget_s = SECTIONS[name] if budget_s is None else budget_s
    print(f"gpucheck: {name}, up to {budget_s:.0f} s …", file=sys.stderr, flush=True)
    started = time.monotonic()
    with subprocess.Popen(
        [*command, name, device], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=budget_s)
            why = f"its process ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a compiler may run below it
            output, _ = process.communicate()
            why = f"it did not end in {budget_s:.0f} s and was killed"
    report = _last_told(output) or Report(name, SECTIONS[name])
    if not report.seconds:  # only told at the end
        report.status, report.why = "died", why
    report.seconds = time.monotonic() - started
    return report


def _last_told(output: str) -> Report | None:
    for line in reversed(output.splitlines()):
        if line.startswith(_MARK):
            try:
                return Report.read(line.removeprefix(_MARK))
            except ValueError:
                continue  # cut short
    return None
