"""What a process may use, told by fake ``/proc`` and ``/sys`` trees."""

import ctypes
import mmap
from pathlib import Path

import pytest

from hicache import machine
from hicache.errors import ConfigError

GB = 10**9
MEMINFO = "MemTotal:       31250000 kB\nMemFree:         100 kB\nMemAvailable:   15625000 kB\n"
"""32 GB, of which 16 GB are available."""


def tree(root: Path, files: dict[str, str | int]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def bare(root: Path, cgroup: str, files: dict[str, str | int]) -> Path:
    return tree(root, {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files})


def test_without_cgroups_the_machine_decides(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": MEMINFO})

    assert machine.available_nbytes(root) == 16 * GB
    assert machine.total_nbytes(root) == 32 * GB


def test_a_container_with_its_own_namespace_has_its_limit_at_the_root(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "sys/fs/cgroup/memory.max": 4 * GB,
        "sys/fs/cgroup/memory.current": 1 * GB,
    }
    root = bare(tmp_path, "0::/", files)

    assert machine.available_nbytes(root) == 3 * GB
    assert machine.total_nbytes(root) == 4 * GB


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "sys/fs/cgroup/pod/memory.max": 4 * GB,
        "sys/fs/cgroup/pod/memory.current": 3 * GB,
        "sys/fs/cgroup/pod/job/memory.max": "max",
        "sys/fs/cgroup/pod/job/memory.current": 1 * GB,
        "sys/fs/cgroup/pod/job/task/memory.max": 8 * GB,
        "sys/fs/cgroup/pod/job/task/memory.current": 1 * GB,
    }
    root = bare(tmp_path, "0::/pod/job/task", files)

    assert machine.available_nbytes(root) == 1 * GB
    assert machine.total_nbytes(root) == 4 * GB


def test_the_limit_where_throttling_starts_counts(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "sys/fs/cgroup/memory.max": 4 * GB,
        "sys/fs/cgroup/memory.high": 2 * GB,
        "sys/fs/cgroup/memory.current": 1 * GB,
    }
    root = bare(tmp_path, "0::/", files)

    assert machine.available_nbytes(root) == 1 * GB


def test_page_cache_is_not_taken_for_memory_in_use(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "sys/fs/cgroup/memory.max": 8 * GB,
        "sys/fs/cgroup/memory.current": 8 * GB,
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {3 * GB}\nactive_file {2 * GB}",
    }
    root = bare(tmp_path, "0::/", files)

    assert machine.available_nbytes(root) == 4 * GB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "sys/fs/cgroup/memory.max": 1 * GB,
        "sys/fs/cgroup/memory.current": 2 * GB,
    }
    root = bare(tmp_path, "0::/", files)

    assert machine.available_nbytes(root) == 0


def test_version_1_limits_count_with_the_page_cache_of_the_whole_subtree(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 20 * GB,
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": 4 * GB,
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": 3 * GB,
        "sys/fs/cgroup/memory/box/memory.stat": f"inactive_file 1\ntotal_inactive_file {GB}",
    }
    root = bare(tmp_path, "5:cpu,cpuacct:/box\n4:memory:/box\n1:name=systemd:/\n0::/", files)

    assert machine.available_nbytes(root) == 2 * GB
    assert machine.total_nbytes(root) == 4 * GB


def test_a_container_told_its_path_on_the_host_finds_its_limit_at_the_mount(
    tmp_path: Path,
) -> None:
    files: dict[str, str | int] = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 1 * GB,
    }
    root = bare(tmp_path, "4:memory:/docker/0123abcd", files)

    assert machine.available_nbytes(root) == 1 * GB


def test_a_path_outside_the_namespace_does_not_lead_out_of_the_tree(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "sys/fs/cgroup/memory.max": 2 * GB,
        "sys/fs/cgroup/memory.current": 0,
    }
    root = bare(tmp_path, "0::/../../other", files)

    assert machine.available_nbytes(root) == 2 * GB


def test_a_machine_that_does_not_tell_asks_for_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no MemAvailable\): set sizes yourself"):
        machine.available_nbytes(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 5),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 5),
        ({"sys/fs/cgroup/cpu.max": "350000 100000"}, 3),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/box",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": 200000,
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": 100000,
            },
            2,
        ),
    ],
)
def test_processors_are_bounded_by_affinity_and_quota(
    tmp_path: Path, files: dict[str, str | int], expected: int
) -> None:
    status = "Name:\tpython\nCpus_allowed_list:\t0-3,7"
    root = tree(tmp_path, {"proc/self/status": status, "proc/self/cgroup": "0::/", **files})

    assert machine.num_cpus(root) == expected


def test_the_processor_is_named_by_its_model_or_its_architecture(tmp_path: Path) -> None:
    assert machine.cpu_model(tmp_path) != ""

    tree(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Zen 9\nprocessor\t: 1"})

    assert machine.cpu_model(tmp_path) == "Zen 9"


def test_free_disk_is_told_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    free = machine.free_disk_nbytes(tmp_path / "not" / "yet")

    assert free > 0


def test_this_machine_tells_what_it_has() -> None:
    assert 0 < machine.available_nbytes() <= machine.total_nbytes()
    assert machine.num_cpus() >= 1


# ---------------------------------------------------------------- limits of the process


def test_what_ulimit_leaves_counts(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "proc/self/limits": "Limit                     Soft Limit    Hard Limit    Units\n"
        "Max data size             unlimited     unlimited     bytes\n"
        "Max address space         8000000000    unlimited     bytes",
        "proc/self/status": "VmSize:\t 1000000 kB\nVmData:\t 500000 kB",
    }
    root = bare(tmp_path, "0::/", files)

    assert machine.available_nbytes(root) == 8 * GB - 1024 * 10**6


# ---------------------------------------------------------------- NUMA


@pytest.mark.parametrize(
    ("online", "told", "expected"),
    [("0-1", "1", 1), ("0,2", "2", 2), ("0", "0", None), ("0-1", "-1", None), ("0-1", "", None)],
)
def test_a_device_has_a_node_where_there_are_several_and_it_is_known(
    online: str, told: str, expected: int | None, tmp_path: Path
) -> None:
    files: dict[str, str | int] = {
        "sys/devices/system/node/online": online,
        "sys/bus/pci/devices/0000:ab:00.0/numa_node": told,
    }

    assert machine.numa_node("0000:AB:00.0", tree(tmp_path, files)) == expected


def test_a_machine_that_tells_nothing_has_no_nodes(tmp_path: Path) -> None:
    assert machine.numa_node("0000:ab:00.0", tmp_path) is None


def test_memory_stays_usable_whether_the_system_takes_a_preference_or_not() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    answers = [machine.prefer_node(address, 1 << 20, node) for node in (0, 70)]
    memory[:4] = b"here"

    assert answers[1] is False, "there is no node 70"
    assert memory[:4] == b"here"
