"""L3: pages in storage, behind one loop thread that believes nothing a backend says."""

from hicache.store.counters import StoreStats
from hicache.store.page_store import PageStore

__all__ = ["PageStore", "StoreStats"]
