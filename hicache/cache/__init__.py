"""The body: pools, copies and storage, driven by the planner's plans."""

from hicache.cache.accounts import Accounts, CacheStats
from hicache.cache.hicache import HiCache
from hicache.cache.lease import Lease, Polled

__all__ = ["Accounts", "CacheStats", "HiCache", "Lease", "Polled"]
