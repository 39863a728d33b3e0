"""Writing a workload as a stream of references, for other simulators.

``oracle-general`` is libCacheSim's binary form: a record of 24 bytes for each reference, little
endian: time in seconds (u32), object (u64), size (u32), and the place in the stream at which the
object comes next, -1 where it does not (i64).
"""

from pathlib import Path

import numpy as np

from hicache.errors import ConfigError, InputError
from hicache.keys import NamespaceDigest
from hicache.tools.replay.workload import Workload

RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])

FORMATS = ("oracle-general",)


def export(workload: Workload, form: str, path: Path) -> int:
    """Write every page that is referred to, in order, each of size 1; return how many there are.

    28 bytes of memory a reference. Raises ``InputError`` if the file cannot be written.
    """
    if form not in FORMATS:
        raise ConfigError(f"--export {form}: not one of {', '.join(FORMATS)}")
    if workload.page_grains > 1:
        raise ConfigError("--export: only with pages as large as the trace's blocks, or smaller")
    records = np.empty(workload.num_pages, RECORD)
    tenants: dict[NamespaceDigest, int] = {}
    first, start_s = 0, workload.jobs[0].time_s
    for job in workload.jobs:
        tenant = tenants.setdefault(job.namespace, len(tenants))
        part = records[first : first + job.num_pages]
        part["time"] = int(job.time_s - start_s)
        part["object"] = np.frombuffer(job.tokens, "<u4").astype("<u8") + (tenant << 32)
        first += job.num_pages
    records["size"] = 1
    records["next"] = _next_references(records["object"])
    try:
        records.tofile(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    return len(records)


def _next_references(objects: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> object:
    """Return where each object comes next; -1 where it does not."""
    order = np.argsort(objects, kind="stable")
    following = np.full(len(objects), -1, "<i8")
    is_same = objects[order[1:]] == objects[order[:-1]]
    following[order[:-1][is_same]] = order[1:][is_same]
    return following
