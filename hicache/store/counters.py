"""What L3 has done so far, for metrics and for people."""

from collections.abc import Mapping
from dataclasses import dataclass

from hicache.histogram import Histogram
from hicache.storage import StorageStats
from hicache.store.operations import Kind


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a ``PageStore``. Counts start with it, and only grow."""

    num_fetched_pages: int
    """Read and proved."""
    num_absent_pages: int
    """Asked for, and not there."""
    num_corrupt_pages: int
    """There, and not what they should be: deleted."""
    num_foreign_pages: int
    """Sealed with a key that is not here: found by the last scan, and left alone."""
    num_stored_pages: int
    num_present_pages: int
    """Not written, because they were there already."""
    num_deleted_pages: int
    read_nbytes: int
    written_nbytes: int
    day_written_nbytes: int
    """Written in the last 24 hours, also before this process."""
    num_share_evicted_pages: int
    """Deleted because their tenant was over its share."""
    tenant_nbytes: Mapping[str, int]
    """Bytes of records by tenant, where shares are limited."""
    dropped: Mapping[str, int]
    """Keys that came to nothing, by ``<kind>_<reason>``, as ``store_queue_full``."""
    missed: Mapping[Kind, int]
    """Keys that storage answered for and did not have, or had damaged, by kind."""
    errors: Mapping[str, int]
    """Calls that failed, by ``<kind>_<error>``."""
    num_retries: int
    call_seconds: Mapping[Kind, Histogram]
    """How long the calls took that returned in time, by kind."""
    num_queued: Mapping[Kind, int]
    """Keys that wait now, by kind."""
    num_lent_pages: int
    """Pages of L2 that a call holds now."""
    num_overdue_pages: int
    """Those of them whose call was given up."""
    is_up: bool
    """Whether the breaker lets calls through."""
    is_full: bool
    """Whether storing is suspended, because the backend said that there is no room."""
    num_breaks: int
    """How often the backend was detached."""
    backend: StorageStats | None
    """What the backend holds, as of a while ago."""
