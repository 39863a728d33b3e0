"""Many runs of one trace, in parallel on the cores there are.

Workers are forked, so that the workload is in memory once.
"""

import itertools
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

from hicache import machine
from hicache.errors import ConfigError
from hicache.tools.replay.optimum import Sharing
from hicache.tools.replay.replaying import replay
from hicache.tools.replay.report import describe_run
from hicache.tools.replay.settings import Settings
from hicache.tools.replay.workload import Workload

Workloads = Mapping[int | None, Workload]
"""A trace cut into pages, by the page size of the settings."""

_shared: list[tuple[Workloads, Mapping[int | None, Sharing]]] = []
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
        if name.strip().removesuffix("_gb") in (axis[0][0].removesuffix("_gb") for axis in axes):
            raise ConfigError(f"--sweep {text}: {name} is swept already; write all values at once")
        axes.append([(name.strip(), value.strip()) for value in values.split(",")])
    found: list[Settings] = []
    for choice in itertools.product(*axes):
        run = settings
        for name, value in choice:
            run = run.with_value(name, value)
        run.check()
        found.append(run)
    return found


def run_all(
    workloads: Workloads, runs: Sequence[Settings], sharing: Mapping[int | None, Sharing]
) -> list[dict[str, object]]:
    """Replay a trace with each of the settings; return the runs described, in order.

    ``sharing`` is that of each of the workloads.
    """
    _shared.append((workloads, sharing))
    num_workers = min(len(runs), machine.num_cpus())
    try:
        if num_workers <= 1:
            return [_run(settings) for settings in runs]
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
            return list(pool.map(_run, runs))
    finally:
        _shared.pop()


def _run(settings: Settings) -> dict[str, object]:
    workloads, sharing = _shared[-1]
    size = settings.page_size
    return describe_run(replay(workloads[size], settings, sharing[size]))
