"""Makes the parts of a cache from its settings."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hicache.config import CacheConfig, StorageConfig, cache_directory
from hicache.errors import ConfigError
from hicache.eviction import POLICIES as RANKS
from hicache.layout import ITEM_NBYTES, KVLayout
from hicache.machine import free_disk_nbytes, used_disk_nbytes
from hicache.planner import Planner, PlannerConfig
from hicache.plugins import make_backend
from hicache.pools import (
    CudaRegistrar,
    DevicePool,
    HostPool,
    LoggedProgress,
    node_of,
    num_device_pages,
    num_host_pages,
)
from hicache.prefetch import BestEffort, PrefetchPolicy, Timeout, WaitComplete
from hicache.sizes import Size
from hicache.storage import StorageBackend
from hicache.store import PageStore
from hicache.transfer import Transfer, open_transfer
from hicache.writing import ADMISSION
from hicache.writing import POLICIES as WRITING

MAX_AUTO_STORE_NBYTES = 64 * 10**9

FULL_DISK_NBYTES = 16 * 2**20
"""A budget below this means that the disk is full."""


@dataclass(slots=True)
class Parts:
    """What a cache is made of. Owns the threads: ``close`` ends them."""

    planner: Planner
    device: DevicePool
    host: HostPool
    transfer: Transfer
    store: PageStore | None
    wake: threading.Event
    """Set when a copy or storage has something to report."""
    config: CacheConfig
    store_path: Path | None = None
    store_nbytes: int | None = None

    def close(self, timeout_s: float) -> bool:
        """End the copies and the storage, then give the memory back.

        False where a call of storage hangs: its thread stays, and so does L2, which it may write.
        """
        is_closed = self.store is None or self.store.close(timeout_s)
        self.transfer.close()
        if is_closed:
            self.host.close()
        return is_closed

    def describe(self) -> list[str]:
        """Return what is used, in a few lines for people."""
        layout, config = self.device.layout, self.config
        lines = [
            f"L1 device   {_tier(layout, self.device.num_pages)} on {self.device.pages.device}, "
            f"{config.device.eviction}"
        ]
        if not self.host.num_pages:
            return [*lines, "L2 host     none", "L3 storage  none"]
        pinned = ", pinned" if self.host.is_pinned else ""
        lines.append(
            f"L2 host     {_tier(layout, self.host.num_pages)}{pinned}, "
            f"{config.host.eviction}, {config.host.write_policy}"
        )
        if self.store is None:
            return [*lines, "L3 storage  none"]
        found = self.store.stats().backend
        records = f", {found.num_records:,} records found there" if found else ""
        budget = f" up to {self.store_nbytes / 1e9:.2f} GB" if self.store_nbytes else ""
        where = f" in {self.store_path}" if self.store_path else ""
        lines.append(
            f"L3 storage  {config.storage.backend}{budget}{where}, "
            f"{config.storage.prefetch}{_coding(config.storage)}{records}"
        )
        return lines


def open_parts(
    layout: KVLayout, config: CacheConfig, device: str, clock: Callable[[], float]
) -> Parts:
    """Reserve the pools and open storage; raise ``ConfigError`` or ``StorageError``."""
    if config.page_size != layout.page_size:
        raise ConfigError(
            f"cache.page_size: {config.page_size} tokens, but the layout has pages of "
            f"{layout.page_size}"
        )
    host_pages = num_host_pages(config.host.size, layout)
    store_nbytes = path = backend = None
    if host_pages and config.storage.backend != "none":
        path = store_path(config.storage)
        store_nbytes = _store_nbytes(config.storage, layout, path)
        backend = _backend(config.storage, path, store_nbytes)
    device_pages = num_device_pages(
        config.device.size, layout, device, fraction=config.device.fraction
    )
    device_pool = DevicePool(layout, device_pages, device, LoggedProgress("L1"))
    host_pool = HostPool(
        layout,
        host_pages,
        CudaRegistrar() if device_pool.is_cuda else None,
        LoggedProgress("L2"),
        numa_node=node_of(device_pool.pages.device),
    )
    store = None
    wake = threading.Event()
    if backend is not None:
        store = PageStore(
            backend, host_pool.memory, layout.page_nbytes, config.storage,
            page_size=layout.page_size, item_nbytes=ITEM_NBYTES[layout.dtype], clock=clock,
        )  # fmt: skip
        wake = store.wake
        store.start()
    planner = Planner(planner_config(layout, config, device_pool.num_pages, host_pages))
    staging_nbytes = config.device.staging_mb * 10**6
    transfer = open_transfer(device_pool, host_pool, wake, staging_nbytes)
    return Parts(planner, device_pool, host_pool, transfer, store, wake, config, path, store_nbytes)


def planner_config(
    layout: KVLayout, config: CacheConfig, device_pages: int, host_pages: int
) -> PlannerConfig:
    """Return the planner's view of the settings."""
    return PlannerConfig(
        page_size=layout.page_size,
        page_nbytes=layout.page_nbytes,
        device_pages=device_pages,
        host_pages=host_pages,
        has_storage=host_pages > 0 and config.storage.backend != "none",
        device_rank=RANKS[config.device.eviction],
        host_rank=RANKS[config.host.eviction],
        writing=WRITING[config.host.write_policy],
        prefetch=_prefetch(config.storage),
        low_water_pages=int(device_pages * config.device.low_water) if host_pages else 0,
        touch_interval_s=config.storage.touch_interval_s,
        min_store_users=ADMISSION[config.storage.admission],
    )


def _prefetch(config: StorageConfig) -> PrefetchPolicy:
    if config.prefetch == "best_effort":
        return BestEffort()
    if config.prefetch == "wait_complete":
        return WaitComplete()
    return Timeout(config.timeout_base_s, config.timeout_per_ki_token_s)


def store_path(config: StorageConfig) -> Path:
    """Return where a disk backend keeps its files."""
    if config.path is not None:
        return config.path.expanduser()
    return cache_directory() / "store"


def _store_nbytes(config: StorageConfig, layout: KVLayout, path: Path) -> int:
    if config.size == "none":
        raise ConfigError("cache.storage.size: to have no storage, set cache.storage.backend")
    if config.size == "auto":
        # Counting what the store has already: else every restart would throw half of it away.
        return min((free_disk_nbytes(path) + used_disk_nbytes(path)) // 2, MAX_AUTO_STORE_NBYTES)
    return Size.parse(config.size).nbytes(layout.page_size, layout.page_nbytes)


def _backend(config: StorageConfig, path: Path, budget_nbytes: int) -> StorageBackend:
    try:
        return make_backend(config.backend, config.options, path=path, budget_nbytes=budget_nbytes)
    except ConfigError as error:
        if config.size == "auto" and budget_nbytes < FULL_DISK_NBYTES:
            raise ConfigError(
                f"{error}; cache.storage.size = auto makes it {budget_nbytes / 2**20:.1f} MiB, "
                "half of what its disk has left"
            ) from None
        raise


def _coding(config: StorageConfig) -> str:
    codec = "" if config.codec == "none" else f", {config.codec}"
    is_sealed = config.key is not None or config.key_file is not None
    return f"{codec}, encrypted" if is_sealed else codec


def _tier(layout: KVLayout, num_pages: int) -> str:
    nbytes, num_tokens = num_pages * layout.page_nbytes, num_pages * layout.page_size
    return f"{nbytes / 1e9:.2f} GB, {num_tokens:,} tokens in {num_pages:,} pages"
