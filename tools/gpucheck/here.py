"""Section 1: what is there, and what follows from what is not."""

import importlib
import os
import platform
import resource

import torch

from hicache import machine
from hicache.tools.gpucheck.findings import Report
from hicache.tools.gpucheck.running import Room
from hicache.tools.gpucheck.standins import FOR_WHAT, missing
from hicache.transfer.streams import load_runtime

_VERSIONS = ("torch", "transformers", "numpy", "triton", "flashinfer")


def run(room: Room, report: Report) -> None:
    """Say what this machine has."""
    report.note(f"Python {platform.python_version()}, {platform.platform()}")
    report.note(", ".join(_version(name) for name in _VERSIONS))
    for name in missing():
        report.note(f"{name} is not installed ({FOR_WHAT[name]})")
    report.note(f"{machine.num_cpus()} processors: {machine.cpu_model()}")
    report.figure("memory that is available", machine.available_nbytes() / 1e9, "GB")
    report.figure("memory in all, or of the cgroup", machine.total_nbytes() / 1e9, "GB")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    report.note(f"ulimit -l: {'unlimited' if unlimited else f'{locked / 1e9:.3g} GB'}")
    report.note(f"alloc config: {os.environ.get('PYTORCH_CUDA_ALLOC_CONF', 'default')}")
    if room.is_small:
        report.note("a dry run on the CPU: no figure of it says anything about a GPU")
        return
    _describe_gpu(torch.device(room.device), report)


def _describe_gpu(device: torch.device, report: Report) -> None:
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    report.note(
        f"{found.name}, capability {found.major}.{found.minor}, "
        f"{found.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
    )
    report.note(f"driver: {_driver()}")
    report.figure("device memory", total / 1e9, "GB")
    report.figure("device memory that is free", free / 1e9, "GB")
    has_rows = load_runtime() is not None
    how = "one copy a run" if has_rows else "page by page: libcudart is not to be had"
    report.note(f"parts of neighbouring pages are copied {how}")
    ones = torch.ones(1 << 20, device=device, dtype=torch.bfloat16)
    total_of_ones = float(ones.float().sum())
    report.result("a sum on the device", total_of_ones == 1 << 20, f"{total_of_ones:.0f}")


def _version(name: str) -> str:
    try:
        module = importlib.import_module(name)
    except ImportError:
        return f"no {name}"
    except (OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        return f"{name}, which cannot be imported ({type(error).__name__})"
    return f"{name} {getattr(module, '__version__', '?')}"


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"
