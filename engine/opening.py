"""Which cache an engine gets where nobody says."""

from hicache.cache import HiCache
from hicache.config import CacheConfig
from hicache.engine.caching import Cache
from hicache.layout import KVLayout


def open_hicache(layout: KVLayout, config: CacheConfig, device: str) -> Cache:
    """Return the cache of these settings; raise ``ConfigError`` where it cannot be had."""
    return HiCache(layout, config, device=device)
