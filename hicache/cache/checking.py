"""Whether storage can be had with these settings, before a model is loaded for it."""

from contextlib import suppress

from hicache.cache.opening import store_path
from hicache.codec import open_keyring
from hicache.config import CacheConfig
from hicache.disk.directory import prepare
from hicache.errors import ConfigError, HiCacheError, StorageOutdated
from hicache.plugins import backend_class, make_backend
from hicache.sizes import Size
from hicache.storage import StorageBackend


def check_storage(config: CacheConfig) -> None:
    """Raise ``ConfigError`` in one line that names the setting which cannot work.

    Touches nothing but the directory of the store, which is made. What only opening can tell, as
    that a server does not answer, is found out later.
    """
    storage = config.storage
    if config.host.size == "none" or storage.backend == "none":
        return
    open_keyring(storage)
    path, size = store_path(storage), None if storage.size == "auto" else Size.parse(storage.size)
    nbytes = int(size.amount) if size is not None and size.unit == "bytes" else None
    setting = "backend"
    try:
        found = backend_class(storage.backend)
        setting = "options"
        make_backend(storage.backend, storage.options, path=path, budget_nbytes=None)
        setting = "size"
        backend = make_backend(storage.backend, storage.options, path=path, budget_nbytes=nbytes)
        setting = "path"
        if found.is_there is not StorageBackend.is_there:  # it looks at the path
            with suppress(StorageOutdated):  # it will be begun anew
                backend.is_there()
            prepare(path)
    except HiCacheError as error:
        why = str(error).removeprefix("storage.options.")
        name = f"options.{why}" if why != str(error) else f"{setting}: {why}"
        raise ConfigError(f"cache.storage.{name}") from None
