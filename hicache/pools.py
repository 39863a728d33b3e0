"""The memory of L1 and L2: one tensor of pages each, there from start to end.

``N`` pages, each ``page_shape`` of the layout (layers first), contiguous: ``[N, *page_shape]``.
Pools know nothing of who owns a slot. Memory is touched at start, so that no copy later pays for
page faults and a machine that is too small says so at once.
"""

import logging
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import ClassVar, Literal, Protocol, SupportsInt, cast

import torch

from hicache import machine
from hicache.errors import ConfigError
from hicache.layout import KVLayout
from hicache.sizes import Size

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all, while memory is touched and registered."""

_CHUNK_NBYTES = 256 << 20
_OS_PAGE_NBYTES = mmap.PAGESIZE
_SHARES = {"device": 1 / 8, "host": 1 / 4}


class DevicePool:
    """L1: the pages that attention reads and writes."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> None:
        """Raise ``ConfigError`` where the memory is not to be had. The pages are zero."""
        self.layout = layout
        self.num_pages = num_pages
        shape = (num_pages, *layout.page_shape)
        if torch.device(device).type == "cpu":
            flat = _flat(_memory(num_pages * layout.page_nbytes, "L1"))
            _touch(flat, progress)
            self.pages = flat.view(_dtype(layout)).view(shape)
            return
        try:
            self.pages = torch.zeros(shape, dtype=_dtype(layout), device=device)
        except torch.OutOfMemoryError as error:
            nbytes = num_pages * layout.page_nbytes
            raise ConfigError(f"L1: {device} has no room for {_gb(nbytes)}: {error}") from None

    @property
    def is_cuda(self) -> bool:
        """Whether copies to and from it run on a stream."""
        return self.pages.is_cuda


class Registrar(Protocol):
    """What pins memory for a device."""

    def register(self, address: int, nbytes: int) -> bool:
        """Pin memory; False where the system refuses."""
        ...

    def unregister(self, address: int) -> None:
        """Release memory that was pinned from this address on."""
        ...


class HostPool:
    """L2: host memory, pinned for a GPU where there is one.

    Pinned in chunks of whole pages: one registration of everything stalls for long and fails as
    a whole. A copy must not cross from one chunk into the next (``chunk_pages``). What cannot be
    pinned is used as it is, with a warning: copies are right, but slower, and hold up the step.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        registrar: Registrar | None = None,
        progress: Progress | None = None,
        chunk_nbytes: int = _CHUNK_NBYTES,
        numa_node: int | None = None,
    ) -> None:
        """Raise ``ConfigError`` where the memory is not to be had. The pages are zero.

        ``numa_node`` is where it should be, as near to the device as can be.
        """
        self.layout = layout
        self.num_pages = num_pages
        self.page_nbytes = layout.page_nbytes
        self.chunk_pages = _chunk_pages(layout.page_nbytes, chunk_nbytes) if registrar else 0
        """Slots a chunk that is pinned by itself; 0 where nothing is pinned."""
        self.memory = _memory(num_pages * layout.page_nbytes, "L2", is_pinned=registrar is not None)
        """The same bytes, flat: slot ``i`` from ``i * page_nbytes`` on. Writable."""
        flat = _flat(self.memory)
        self._registrar = registrar
        self._registered: list[int] = []
        if numa_node is not None and flat.numel():
            has_node = machine.prefer_node(flat.data_ptr(), flat.numel(), numa_node)
            logger.info("L2 is on NUMA node %d%s", numa_node, "" if has_node else ", or elsewhere")
        self._prepare(flat, registrar, progress)
        self.pages = flat.view(_dtype(layout)).view(num_pages, *layout.page_shape)

    @property
    def is_pinned(self) -> bool:
        """Whether all of it is pinned."""
        nbytes = self.chunk_pages * self.page_nbytes
        return bool(nbytes) and len(self._registered) == -(-len(self.memory) // nbytes)

    def close(self) -> None:
        """Unpin. No copy may be in flight. Calling it twice is harmless."""
        while self._registered and self._registrar is not None:
            self._registrar.unregister(self._registered.pop())

    def _prepare(
        self, flat: torch.Tensor, registrar: Registrar | None, progress: Progress | None
    ) -> None:
        """Touch the memory and pin it, chunk by chunk."""
        chunk_nbytes = self.chunk_pages * self.page_nbytes or _CHUNK_NBYTES
        for start in range(0, flat.numel(), chunk_nbytes):
            chunk = flat[start : start + chunk_nbytes]
            chunk.zero_()
            if registrar is not None:
                if registrar.register(chunk.data_ptr(), chunk.numel()):
                    self._registered.append(chunk.data_ptr())
                else:
                    registrar = None
                    logger.warning(
                        "the system refused to pin L2 beyond %s of %s (see ulimit -l): copies of "
                        "the rest are slower, and hold up the step",
                        _gb(start),
                        _gb(flat.numel()),
                    )
            if progress is not None:
                progress(start + chunk.numel(), flat.numel())


class CudaRegistrar:
    """Pins memory with the CUDA runtime, for all devices of the process."""

    _PORTABLE = 1
    _pinned: ClassVar[dict[int, int]] = {}

    @classmethod
    def pinned_nbytes(cls) -> int:
        """Return what this process has pinned so and not released."""
        return sum(cls._pinned.values())

    def register(self, address: int, nbytes: int) -> bool:
        """Pin memory; False where the system refuses."""
        if int(_cudart().cudaHostRegister(address, nbytes, self._PORTABLE)) == 0:
            self._pinned[address] = nbytes
            return True
        # The runtime remembers the refusal and torch would raise it at its next launch, which
        # knows nothing of it: let a launch of ours have it.
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            logger.debug("pinning was refused: %s", error)
        return False

    def unregister(self, address: int) -> None:
        """Release memory that was pinned from this address on."""
        _cudart().cudaHostUnregister(address)
        self._pinned.pop(address, None)


class _Cudart(Protocol):
    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> SupportsInt: ...
    def cudaHostUnregister(self, pointer: int, /) -> SupportsInt: ...


def _cudart() -> _Cudart:
    return cast(_Cudart, torch.cuda.cudart())  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- how many pages


class LoggedProgress:
    """Says now and then how far a pool is, where that takes longer than a moment."""

    def __init__(
        self, name: str, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._every_s = every_s
        self._clock = clock
        self._said = clock()

    def __call__(self, done_nbytes: int, nbytes: int) -> None:
        """Take note; log where the last time is long ago."""
        now = self._clock()
        if now - self._said >= self._every_s and done_nbytes < nbytes:
            self._said = now
            logger.info("%s: %s of %s are ready", self._name, _gb(done_nbytes), _gb(nbytes))


def node_of(device: torch.device) -> int | None:
    """Return the NUMA node that a GPU is attached to; ``None`` where there is no choice."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    numbers = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, slot = numbers
    if domain is None or bus is None or slot is None:
        return None  # an older torch
    return machine.numa_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0")


@dataclass(frozen=True, slots=True)
class _Tier:
    setting: str
    share: float
    available_nbytes: int


def num_device_pages(
    size: str,
    layout: KVLayout,
    device: str = "cpu",
    root: Path = machine.ROOT,
    fraction: float = 0.85,
) -> int:
    """Return how many pages a setting gives L1; raise ``ConfigError`` where they do not fit.

    On a GPU ``auto`` is a ``fraction`` of what is free there now: ask when the model is loaded
    and a forward as large as they come has run, so that what torch keeps for it is taken already.
    """
    if torch.device(device).type == "cpu":
        tier = _Tier("cache.device.size", _SHARES["device"], machine.available_nbytes(root))
    else:
        free, _ = torch.cuda.mem_get_info(device)
        tier = _Tier("cache.device.size", fraction, free)
    if size == "none":
        raise ConfigError("cache.device.size: attention reads L1, so there must be one")
    return _num_pages(size, layout, tier)


def num_host_pages(size: str, layout: KVLayout, root: Path = machine.ROOT) -> int:
    """Return how many pages a setting gives L2; raise ``ConfigError`` where they do not fit."""
    if size == "none":
        return 0
    tier = _Tier("cache.host.size", _SHARES["host"], machine.available_nbytes(root))
    return _num_pages(size, layout, tier)


def _num_pages(size: str, layout: KVLayout, tier: _Tier) -> int:
    if size == "auto":
        num_pages = int(tier.available_nbytes * tier.share) // layout.page_nbytes
    else:
        num_pages = Size.parse(size).num_pages(layout.page_size, layout.page_nbytes)
    if num_pages < 1:
        raise ConfigError(
            f"{tier.setting}: {size} is less than one page of {layout.page_nbytes:,} bytes "
            f"({_gb(tier.available_nbytes)} available)"
        )
    nbytes = num_pages * layout.page_nbytes
    if nbytes > tier.available_nbytes:
        raise ConfigError(
            f"{tier.setting}: {size} asks for {_gb(nbytes)}, "
            f"but {_gb(tier.available_nbytes)} are available"
        )
    return num_pages


# ---------------------------------------------------------------- memory


def _memory(nbytes: int, name: Literal["L1", "L2"], *, is_pinned: bool = False) -> memoryview:
    """Return memory in a mapping of its own, so that it starts at a page of the system.

    It is unmapped when the last view of it goes. Memory that will be pinned is not there in
    children: after a fork, who writes first gets a copy, and the device would keep the other.
    """
    if nbytes == 0:
        return memoryview(bytearray())
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"{name}: {_gb(nbytes)} of memory cannot be had: {error}") from None
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        logger.debug("no huge pages: %s", error)
    if is_pinned:
        mapping.madvise(mmap.MADV_DONTFORK)
    return memoryview(mapping)


def _flat(memory: memoryview) -> torch.Tensor:
    """Return the same bytes as uint8 ``[nbytes]``."""
    if not memory:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _touch(memory: torch.Tensor, progress: Progress | None) -> None:
    for start in range(0, memory.numel(), _CHUNK_NBYTES):
        memory[start : start + _CHUNK_NBYTES].zero_()
        if progress is not None:
            progress(min(start + _CHUNK_NBYTES, memory.numel()), memory.numel())


def _chunk_pages(page_nbytes: int, chunk_nbytes: int) -> int:
    """Return how many pages are pinned at once: about ``chunk_nbytes``.

    A chunk ends where a page of the system ends, which cannot be pinned twice.
    """
    unit = _OS_PAGE_NBYTES // gcd(page_nbytes, _OS_PAGE_NBYTES)
    return max(1, chunk_nbytes // (unit * page_nbytes)) * unit


def _dtype(layout: KVLayout) -> torch.dtype:
    found = getattr(torch, layout.dtype)
    assert isinstance(found, torch.dtype)
    return found


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
