"""What this process may use of the machine: memory, processors, disk.

A container sees all of the machine's memory in ``/proc/meminfo`` and is killed when it uses more
than its cgroup allows, so every cgroup from the process's own up to the root has a say. Functions
take the ``root`` under which ``/proc`` and ``/sys`` lie; nothing here remembers anything.

Linux only. Where something cannot be read it is taken not to be a limit.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hicache.errors import ConfigError

ROOT = Path("/")

_LIMITS = {"Max address space": "VmSize", "Max data size": "VmData"}
"""What bounds the memory that a process can map, and what of it is used."""

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, which the C library does not offer."""

_MPOL_PREFERRED = 1
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def available_nbytes(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process can still take without being killed.

    The least of what the machine has available, of what each cgroup has left, and of what
    ``ulimit`` lets this process map. Page cache of a cgroup counts as left, but for half of what
    is in active use.
    Raises ``ConfigError`` where the machine does not tell.
    """
    left = [_memory_left(group) for group in _groups(root, "memory")]
    left += [_left_of_limit(root, limit, used) for limit, used in _LIMITS.items()]
    return min([_meminfo(root, "MemAvailable"), *(nbytes for nbytes in left if nbytes is not None)])


def total_nbytes(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process could have if it were alone.

    Raises ``ConfigError`` where the machine does not tell.
    """
    limits = (_memory_limit(group) for group in _groups(root, "memory"))
    return min([_meminfo(root, "MemTotal"), *(nbytes for nbytes in limits if nbytes is not None)])


def num_cpus(root: Path = ROOT) -> int:
    """Return how many processors' worth of time this process gets: at least 1, rounded down."""
    allowed = _fields(root / "proc/self/status").get("Cpus_allowed_list")
    counts: list[float] = [_count_ranges(allowed) if allowed else os.cpu_count() or 1]
    counts += [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    return max(1, int(min(counts)))


def numa_node(pci_address: str, root: Path = ROOT) -> int | None:
    """Return the NUMA node that a PCI device (``0000:41:00.0``) is attached to.

    ``None`` where the machine has one node only, or does not tell.
    """
    nodes = _read(root / "sys/devices/system/node/online").strip()
    if not nodes or _count_ranges(nodes) < 2:
        return None
    text = _read(root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node").strip()
    return int(text) if text.isdigit() else None  # -1: the firmware does not know


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Have memory that is not touched yet come from a NUMA node while that has some left.

    ``address`` is where a page of the system begins. False where the system refuses.
    """
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return False
    mask = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    arguments = (address, nbytes, _MPOL_PREFERRED)
    num_bits = len(mask) * _LONG_BITS + 1  # the kernel takes one off
    longs = [ctypes.c_ulong(number) for number in (number, *arguments)]
    return (
        int(syscall(*longs, ctypes.byref(mask), ctypes.c_ulong(num_bits), ctypes.c_ulong(0))) == 0
    )


def cpu_model(root: Path = ROOT) -> str:
    """Return what the processor calls itself, or its architecture where it has no name."""
    return _fields(root / "proc/cpuinfo").get("model name") or os.uname().machine


def free_disk_nbytes(path: Path) -> int:
    """Return the bytes that may still be written under a path, which need not exist yet."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def used_disk_nbytes(path: Path) -> int:
    """Return the bytes on disk of all files under a path; 0 where there is none. O(files)."""
    nbytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # that somebody has removed it meanwhile
                nbytes += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return nbytes


# ---------------------------------------------------------------- cgroups


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's cgroups, own first, then each one above.

    A container without a cgroup namespace is told its path on the host but has its own group
    mounted as the root, and a process that was moved out of its namespace gets ``/../..``: a
    directory that does not exist is passed over on the way up.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if controllers == "":
            found = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            found = [mounts / controllers]
        else:
            continue
        for mount in found:
            for depth in range(len(parts), -1, -1):
                group = mount.joinpath(*parts[:depth])
                if group.is_dir():
                    yield group


def _left_of_limit(root: Path, limit: str, used: str) -> int | None:
    """Return what a limit of this process leaves; ``None`` for one that is none."""
    for line in _read(root / "proc/self/limits").splitlines():
        if line.startswith(limit):
            most = line.removeprefix(limit).split()[0]
            if not most.isdigit():
                return None
            amount = _fields(root / "proc/self/status").get(used, "").split()[0:1]
            return max(0, int(most) - 1024 * int(amount[0] if amount else 0))
    return None


def _memory_limit(group: Path) -> int | None:
    limits = [
        _number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def _memory_left(group: Path) -> int | None:
    limit = _memory_limit(group)
    return None if limit is None else max(0, limit - _memory_in_use(group))


def _memory_in_use(group: Path) -> int:
    used = _number(group / "memory.current")
    if used is None:
        used = _number(group / "memory.usage_in_bytes") or 0
    stat = _fields(group / "memory.stat", separator=" ")
    inactive = _of_tree(stat, "inactive_file")
    active = _of_tree(stat, "active_file")
    return max(0, used - inactive - active // 2)


def _of_tree(stat: Mapping[str, str], name: str) -> int:
    """Return a count of a cgroup and those below it; version 1 calls that ``total_``."""
    return int(stat.get(f"total_{name}") or stat.get(name) or 0)


def _cpu_quota(group: Path) -> float | None:
    # Version 2 says "max 100000" or "150000 100000"; version 1 has a file for each, -1 for none.
    quota, period, *_ = [*_read(group / "cpu.max").split(), "", ""]
    if not quota:
        quota = _read(group / "cpu.cfs_quota_us").strip()
        period = _read(group / "cpu.cfs_period_us").strip()
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


# ---------------------------------------------------------------- files of the kernel


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path, separator: str = ":") -> dict[str, str]:
    """Return ``name: value`` lines; the first of each name."""
    fields: dict[str, str] = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(separator)
        fields.setdefault(name.strip(), value.strip())
    return fields


def _meminfo(root: Path, name: str) -> int:
    amount, _, unit = _fields(root / "proc/meminfo").get(name, "").partition(" ")
    if not amount.isdigit() or unit != "kB":
        raise ConfigError(f"cannot tell how much memory there is (no {name}): set sizes yourself")
    return int(amount) * 1024


def _count_ranges(text: str) -> int:
    """Return how many numbers ``0-3,7`` names."""
    count = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count
