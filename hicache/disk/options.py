"""What an operator may say of a store on a disk."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from hicache.storage import BackendOptions

Durability = Literal["none", "interval", "commit"]


class DiskOptions(BackendOptions):
    """``[storage.options]`` of the backends that keep files."""

    durability: Durability = "none"
    """What outlives a power cut; a crash of the process loses nothing in any case. none: nothing
    is waited for, and what the system had not written yet is lost. interval: all that was stored
    sync_interval_s ago and before. commit: every page that was acknowledged."""
    sync_interval_s: Annotated[float, Field(gt=0)] = 10.0
    """For durability = interval."""
    keep_free_gb: NonNegativeFloat = 0.25
    """Of the file system, in 10**9 bytes. Where less is free, whoever may have filled it, the store
    gives up its oldest records, and stores nothing while that is not enough."""

    @property
    def keep_free_nbytes(self) -> int:
        return int(self.keep_free_gb * 1e9)
