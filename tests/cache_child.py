"""Writes chains of pages until it is killed: ``python -m tests.cache_child STORE BACKEND SEED``.

Prints the number of a chain once all of it is acknowledged by storage, and goes on.
"""

import sys
from pathlib import Path

from hicache.cache import HiCache
from hicache.config import CacheConfig
from hicache.namespace import Namespace
from tests.cache_world import LAYOUT, Reader, tokens_of

NUM_TOKENS = 24


def open_cache(path: Path, backend: str) -> HiCache:
    """Return a small cache over a store on disk."""
    config = CacheConfig.model_validate(
        {
            "page_size": LAYOUT.page_size,
            "device": {"size": "16p"},
            "host": {"size": "64p"},
            "storage": {
                "backend": backend,
                "path": path,
                "size": "32MB",
                "prefetch": "wait_complete",
            },
        }
    )
    return HiCache(LAYOUT, config)


def namespace() -> Namespace:
    """Return the namespace that parent and child share."""
    return Namespace(model_config="{}", weights=b"weights", layout=LAYOUT)


def main(path: str, backend: str, seed: str) -> None:
    """Write chain after chain."""
    cache = open_cache(Path(path), backend)
    digest = cache.open_namespace(namespace())
    print("open", flush=True)
    for number in range(int(seed) * 1000, int(seed) * 1000 + 1000):
        reader = Reader(cache, number + 1, tokens_of(number, NUM_TOKENS, shared=6), digest)
        reader.acquire()
        reader.compute()
        reader.release()
        assert cache.sync(30.0)
        print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
