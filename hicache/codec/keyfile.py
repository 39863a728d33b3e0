"""Master keys, from where the settings say."""

import os
import stat
from base64 import b64decode
from contextlib import suppress
from functools import partial
from pathlib import Path

from hicache.codec.sealing import MASTER_NBYTES, Keyring
from hicache.config import StorageConfig
from hicache.errors import ConfigError

_MAX_NBYTES = 1 << 16


def open_keyring(config: StorageConfig) -> Keyring | None:
    """Return the keys of a store; ``None`` where it is not encrypted.

    Raises ``ConfigError`` in one line, which never shows a key.
    """
    if config.key_file is not None and config.key is not None:
        raise ConfigError("cache.storage: key_file and key are both set; one of them is enough")
    if config.key_file is not None:
        source = f"cache.storage.key_file: {config.key_file}"
        text = _read(config.key_file.expanduser())
    elif config.key is not None:
        source, text = "cache.storage.key", config.key.get_secret_value()
    else:
        return None
    masters = _parse(source, text)
    try:
        return Keyring(masters)
    except ImportError:
        raise ConfigError(
            f"{source}: encryption needs the package cryptography: pip install 'hicache[crypto]'"
        ) from None


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(
                    f"cache.storage.key_file: {path}: a key file must be a regular file"
                )
            if mode & 0o077:
                raise ConfigError(
                    f"cache.storage.key_file: {path}: others may read or write this key file "
                    f"(mode {stat.S_IMODE(mode):04o}): chmod 600 it"
                )
            return file.read(_MAX_NBYTES).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"cache.storage.key_file: {path}: {error.strerror}") from None


def _parse(source: str, text: str) -> list[bytes]:
    """Return the keys of a text, one a line; ``#`` begins a comment."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    masters = [_key(f"{source}: line {at}", line) for at, line in enumerate(lines, 1) if line]
    if not masters:
        raise ConfigError(f"{source}: there is no key in it")
    if len(set(masters)) < len(masters):
        raise ConfigError(f"{source}: a key is in it twice")
    return masters


def _key(source: str, line: str) -> bytes:
    for decode in (bytes.fromhex, partial(b64decode, validate=True)):
        with suppress(ValueError):
            if len(key := decode(line)) == MASTER_NBYTES:
                return key
    raise ConfigError(f"{source}: no key of {MASTER_NBYTES} bytes, in hexadecimal or base64")
