"""Every error that HiCache raises on purpose.

::

    HiCacheError
    ├── ConfigError            a setting is unknown, missing or out of range
    ├── InputError             a request or a file that we cannot use; nothing was changed
    ├── PoolExhausted          a tier has no free page and nothing evictable
    ├── TransferError          a copy between L1 and L2 failed
    └── StorageError           a backend failed; the cache treats it as a miss
        ├── StorageUnavailable     worth retrying: timeout, connection lost
        ├── StorageFull            no room: stop storing, go on serving
        ├── StorageOutdated        a store of another format, which opening begins anew
        └── CorruptPage            bytes do not match their identity or checksum; never retried

A missing key is not an error: lookups return ``None``. A broken invariant is an
``AssertionError``, a bug in HiCache.
"""


class HiCacheError(Exception):
    """Whatever HiCache raises on purpose; its text is one line for a person."""


class ConfigError(HiCacheError):
    """A setting is unknown, missing or out of range."""


class InputError(HiCacheError):
    """A request or a file that we cannot use; nothing was changed."""


class PoolExhausted(HiCacheError):
    """A tier has no free page and nothing evictable."""


class TransferError(HiCacheError):
    """A copy between L1 and L2 failed."""


class StorageError(HiCacheError):
    """A backend failed; the cache treats it as a miss."""


class StorageUnavailable(StorageError):
    """Worth retrying: a timeout, a connection lost."""


class StorageFull(StorageError):
    """The store has no room: stop storing, go on serving."""


class StorageOutdated(StorageError):
    """A store of another format: nothing of it can be read, and opening it begins it anew."""


class CorruptPage(StorageError):
    """Bytes do not match their identity or checksum; never retried."""
