"""Runs sections: each in a process of its own, within its time, whatever becomes of it.

A GPU that has failed once fails everything else in that process, and a kernel that hangs cannot
be stopped from within it.
"""

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from hicache.tools.gpucheck.findings import Report

logger = logging.getLogger("hicache.gpucheck")

SECTIONS: dict[str, float] = {
    "here": 20.0,
    "copies": 80.0,
    "tiers": 120.0,
    "chats": 95.0,
    "leaks": 35.0,
}
"""Seconds that each may take, in the order in which they run: 470 in all. Most stop in good time
by themselves (``Room.is_over``) and say what they left out."""

_LEFT_FOR_THE_END = 0.8
"""Share of its time after which a section begins nothing new."""

_MARK = "gpucheck-report:"


@dataclass(frozen=True, slots=True)
class Room:
    """What a section may use."""

    device: str
    ends_at: float

    @property
    def is_small(self) -> bool:
        """Whether this is a dry run on a CPU."""
        return self.device == "cpu"

    @property
    def is_over(self) -> bool:
        """Whether nothing new should be begun."""
        return time.monotonic() > self.ends_at


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


def run_here(name: str, device: str) -> Report:
    """Run a section in this process. An exception is its end, and is reported."""
    from hicache.tools.gpucheck import standins

    report = Report(name, SECTIONS[name])
    started = time.monotonic()
    room = Room(device, started + SECTIONS[name] * _LEFT_FOR_THE_END)
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


def run_apart(name: str, device: str) -> Report:
    """Run a section in a process of its own, and end that when its time is over."""
    print(f"gpucheck: {name}, up to {SECTIONS[name]:.0f} s …", file=sys.stderr, flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "hicache.tools.gpucheck.child", name, device]
    why = ""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=SECTIONS[name],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        for line in reversed(done.stdout.splitlines()):
            if line.startswith(_MARK):
                report = Report.read(line.removeprefix(_MARK))
                report.seconds = time.monotonic() - started
                return report
        why = f"its process ended with code {done.returncode} and said nothing"
    except subprocess.TimeoutExpired:
        why = f"it did not end in {SECTIONS[name]:.0f} s and was killed"
    seconds = time.monotonic() - started
    return Report(name, SECTIONS[name], seconds, status="died", why=why)


def tell(report: Report) -> None:
    """Hand a report over to the process that ran this one."""
    print(f"{_MARK}{report.written()}", flush=True)
