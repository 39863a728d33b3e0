"""Small configurations and prompts for tests of the planner."""

from typing import TypedDict, Unpack

from hicache.eviction import POLICIES as RANKS
from hicache.planner import PlannerConfig
from hicache.prefetch import BestEffort, PrefetchPolicy
from hicache.writing import ADMISSION
from hicache.writing import POLICIES as WRITING


class Settings(TypedDict, total=False):
    """What a test may want otherwise than ``config`` has it."""

    page_size: int
    device_pages: int
    host_pages: int
    has_storage: bool
    eviction: str
    write: str
    prefetch: PrefetchPolicy
    low_water_pages: int
    batch_pages: int
    num_ghosts: int
    miss_memory_s: float
    max_beliefs: int
    admission: str


def config(more: Settings | None = None, /, **settings: Unpack[Settings]) -> PlannerConfig:
    """Return a small configuration."""
    if more is not None:
        settings.update(more)
    rank = RANKS[settings.get("eviction", "lru")]
    host_pages = settings.get("host_pages", 16)
    return PlannerConfig(
        page_size=settings.get("page_size", 2),
        page_nbytes=64,
        device_pages=settings.get("device_pages", 12),
        host_pages=host_pages,
        has_storage=settings.get("has_storage", True) and host_pages > 0,
        device_rank=rank,
        host_rank=rank,
        writing=WRITING[settings.get("write", "write_through")],
        prefetch=settings.get("prefetch", BestEffort()),
        low_water_pages=settings.get("low_water_pages", 0),
        batch_pages=settings.get("batch_pages", 4),
        num_ghosts=settings.get("num_ghosts", 100),
        miss_memory_s=settings.get("miss_memory_s", 0.0),
        max_beliefs=settings.get("max_beliefs", 100),
        min_store_users=ADMISSION[settings.get("admission", "first")],
    )


def words(first: int, num_tokens: int) -> list[int]:
    """Return tokens that no other prompt has."""
    return list(range(first, first + num_tokens))
