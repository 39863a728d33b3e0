"""What the planner must know of the world."""

from collections.abc import Callable
from dataclasses import dataclass

from hicache.allocator import SlotAllocator, Slots
from hicache.eviction import Rank
from hicache.prefetch import PrefetchPolicy
from hicache.writing import WritePolicy


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Sizes and policies. Fixed for the life of a planner."""

    page_size: int
    page_nbytes: int
    """Bytes of KV a page."""
    device_pages: int
    host_pages: int
    """0 where there is no L2."""
    has_storage: bool
    device_rank: Rank
    host_rank: Rank
    writing: WritePolicy
    prefetch: PrefetchPolicy
    low_water_pages: int = 0
    """L1 pages to keep free by demoting ahead of need."""
    batch_pages: int = 128
    """Pages of one fetch or store."""
    touch_interval_s: float = 60.0
    miss_memory_s: float = 5.0
    """How long a page that storage did not have is not asked for again."""
    num_ghosts: int = 1_000_000
    """Evicted pages that are remembered, so that misses can be explained."""
    max_beliefs: int = 100_000
    """Nodes at the ends of branches that may be known for what L3 has of them alone. Beyond that
    the oldest are forgotten: their records stay, and a probe finds them."""
    min_store_users: int = 1
    """Distinct requests that must have used a page before it is stored; L2 keeps it meanwhile."""
    prefill_tokens_per_s: float | None = None
    """Seed of the measured rate."""
    slots: Callable[[int], Slots] = SlotAllocator
    """Makes what hands out the slots of a pool of that many. No decision depends on which."""
