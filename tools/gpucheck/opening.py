"""Settings of the engines that are measured here: what is alike in all of them."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hicache.config import load
from hicache.engine.engine import Engine
from hicache.engine.model import LoadedModel

BACKENDS = {
    "lmdb": "hicache.backends.lmdb:LmdbBackend",
    "aiofiles": "hicache.backends.file:FileBackend",
}
"""The first whose package is installed is L3. By class: entry points need an installation."""

MEMORY = "hicache.backends.memory:MemoryBackend"


def storage_backend() -> tuple[str, str]:
    """Return what will be L3, for the settings and for people."""
    for package, backend in BACKENDS.items():
        if importlib.util.find_spec(package) is not None:
            return backend, backend.rpartition(":")[2]
    return MEMORY, "memory of this process, since lmdb and aiofiles are not installed"


@contextmanager
def engine_of(
    loaded: LoadedModel, page_size: int, settings: Mapping[str, object]
) -> Iterator[Engine]:
    """Open an engine whose L3, if it has one, is in a directory that goes with it."""
    with TemporaryDirectory(prefix="gpucheck-store-") as path:
        config = load(
            environ={},
            overrides={
                "cache.page_size": page_size,
                "cache.storage.path": Path(path),
                "cache.storage.backend": storage_backend()[0],
                # A bound that no disk reaches: what is slow is measured, not given up.
                "cache.storage.deadline_s": 60.0,
                "engine.schedule": "fcfs",
                **settings,
            },
        )
        with Engine(config, loaded) as engine:
            yield engine
