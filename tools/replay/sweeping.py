"""Many runs of one workload, in parallel on the cores there are.

Workers are forked, so that the workload is in memory once.
"""

import itertools
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from hicache import machine
from hicache.errors import ConfigError
from hicache.tools.replay.optimum import Sharing, find_sharing
from hicache.tools.replay.replaying import replay
from hicache.tools.replay.report import describe_run
from hicache.tools.replay.settings import Settings
from hicache.tools.replay.workload import Workload

_shared: list[tuple[Workload, Sharing]] = []
"""What forked workers find: arguments would be copied to each."""


def combine(settings: Settings, sweeps: Sequence[str]) -> list[Settings]:
    """Return settings for all combinations of ``name=value,value`` texts, the last varying first.

    Raises ``ConfigError`` for what is none.
    """
    axes: list[list[tuple[str, str]]] = []
    for text in sweeps:
        name, equals, values = text.partition("=")
        if not (name and equals and all(values.split(","))):
            raise ConfigError(f"--sweep {text}: write --sweep NAME=VALUE,VALUE")
        axes.append([(name.strip(), value.strip()) for value in values.split(",")])
    found: list[Settings] = []
    for choice in itertools.product(*axes):
        run = settings
        for name, value in choice:
            run = run.with_value(name, value)
        run.check()
        found.append(run)
    return found


def run_all(workload: Workload, runs: Sequence[Settings]) -> list[dict[str, object]]:
    """Replay a workload with each of the settings; return the runs described, in order."""
    sharing = find_sharing(workload.jobs)
    num_workers = min(len(runs), machine.num_cpus())
    if num_workers == 1:
        return [describe_run(replay(workload, settings, sharing)) for settings in runs]
    _shared.append((workload, sharing))
    try:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
            return list(pool.map(_run, runs))
    finally:
        _shared.pop()


def _run(settings: Settings) -> dict[str, object]:
    workload, sharing = _shared[-1]
    return describe_run(replay(workload, settings, sharing))
