"""What the file system of a store has left, and what of it the store may take."""

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

UNBOUNDED_NBYTES = 2**45
"""The budget of those who only look or delete: so much that nothing is evicted for them."""


def room_nbytes(path: Path, keep_free_nbytes: int) -> int:
    """Return how many more bytes may be written there, so that so much stays free.

    Negative where that is less already.
    """
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize - keep_free_nbytes


def tell_if_too_large(path: Path, budget_nbytes: int, held_nbytes: int, keep_free: int) -> None:
    """Say so, in one line, where a store has a budget that its disk cannot hold."""
    most = max(held_nbytes + room_nbytes(path, keep_free), 0)
    if budget_nbytes > most and budget_nbytes != UNBOUNDED_NBYTES:
        logger.warning(
            "%s: its size is %.1f GB, but its disk has room for %.1f GB, and that is what it takes",
            path, budget_nbytes / 1e9, most / 1e9,
        )  # fmt: skip
