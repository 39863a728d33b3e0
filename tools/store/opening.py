"""From flags and settings to an open store. Looking at a store never makes one."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.codec import Keyring, open_keyring
from hicache.config import StorageConfig, cache_directory, load
from hicache.disk.directory import kind_at
from hicache.disk.space import UNBOUNDED_NBYTES
from hicache.errors import ConfigError, InputError
from hicache.layout import KVLayout
from hicache.machine import free_disk_nbytes, used_disk_nbytes
from hicache.plugins import installed, make_backend
from hicache.sizes import Size
from hicache.storage import StorageBackend

_AUTO_NBYTES = 64 * 10**9
"""What ``cache.storage.size = "auto"`` is, at most."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which store is meant."""

    backend: str
    path: Path
    is_said: bool
    """Whether somebody said the path, rather than nobody."""
    options: Mapping[str, Any]
    size: str
    """``cache.storage.size``."""
    keyring: Keyring | None = None
    """The keys of what is sealed, where the settings have them."""

    def __str__(self) -> str:
        return f"{self.backend} in {self.path}"

    def budget_nbytes(self, layout: KVLayout) -> int:
        """Return what the store may hold, for those who write to it."""
        if self.size == "auto":
            free = free_disk_nbytes(self.path) + used_disk_nbytes(self.path)
            return min(free // 2, _AUTO_NBYTES)
        return Size.parse(self.size).nbytes(layout.page_size, layout.page_nbytes)


def locate(config: Path | None, path: Path | None, backend: str | None) -> Place:
    """Return the store that settings and flags name, as a server with them would.

    Where nobody says the backend, the directory tells what it holds. Raises ``ConfigError``.
    """
    overrides = {"cache.storage.path": path, "cache.storage.backend": backend}
    storage = load(config, overrides=overrides).cache.storage
    if storage.backend == "none":
        raise ConfigError("cache.storage.backend is none: there is no store")
    where = storage.path or cache_directory() / "store"
    where = where.expanduser()
    return Place(
        _backend(storage, where),
        where,
        storage.path is not None,
        storage.options,
        storage.size,
        open_keyring(storage),
    )


@asynccontextmanager
async def opened(
    place: Place, *, budget_nbytes: int | None = None, may_make: bool = False
) -> AsyncIterator[StorageBackend]:
    """Give the store, open. Raises ``InputError`` where there is none, and makes none.

    ``budget_nbytes`` is for those who put records: without it nothing may be put.
    """
    budget = UNBOUNDED_NBYTES if budget_nbytes is None else budget_nbytes
    made = make_backend(place.backend, place.options, path=place.path, budget_nbytes=budget)
    is_missing = not made.is_there() or (place.is_said and not place.path.exists())
    if is_missing and not may_make:
        raise InputError(f"{place.path}: there is no store")
    async with made as backend:
        yield backend


def _backend(storage: StorageConfig, path: Path) -> str:
    if "backend" not in storage.model_fields_set:
        kind = kind_at(path)
        if kind in {one.name for one in installed()}:
            assert kind is not None
            return kind
    return storage.backend
