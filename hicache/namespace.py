"""What must be equal for two pages of KV to be interchangeable.

Any one field changed is another namespace: a miss, never a wrong hit. Two namespaces share
neither a node nor a record. The digest of a namespace is the parent key of every first page in
it, and so enters every page key.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from hicache.errors import ConfigError, InputError
from hicache.framing import frame, unframe
from hicache.keys import NamespaceDigest
from hicache.layout import KVLayout

FORMAT_VERSION = 1
"""Of what a namespace describes and of how pages are stored under it."""

DIGEST_NBYTES = 32

_MAGIC = b"hicache-namespace"
_NOT_IDENTITY = frozenset({"_name_or_path", "transformers_version"})
_MAX_HEADER_NBYTES = 100_000_000
_SAMPLE_NBYTES = 128
_SAMPLES_PER_TENSOR = 4


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the model these pages belong to."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise ConfigError(f"{self}: a rank must be below its size")


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that decides which bytes a sequence of tokens has in the cache, but the tokens."""

    model_config: str
    """Canonical JSON (``canonical_config``) of the model's config and of whatever else changes
    what it computes, such as the dtype that it computes in."""
    weights: bytes
    """``weights_fingerprint`` of its directory, or any bytes that name the weights."""
    layout: KVLayout
    """KV dtype, page size and shape."""
    scale_format: str = "none"
    """How quantised KV is scaled."""
    shard: Shard = Shard()
    lora: bytes | None = None
    """Fingerprint of an adapter."""
    salt: bytes | None = None
    """SHA-256 of a tenant's salt, set by ``salted``. The salt itself may be a secret, and this
    is written down."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.salt is not None and len(self.salt) != DIGEST_NBYTES:
            raise ConfigError("a namespace keeps the digest of a salt: use Namespace.salted")

    def salted(self, salt: str | None) -> "Namespace":
        """Return the namespace of one tenant; ``None`` is what all without a salt share.

        The empty salt is a salt like any other.
        """
        if salt is None:
            return replace(self, salt=None)
        return replace(self, salt=salt_digest(salt))

    @property
    def descriptor(self) -> bytes:
        """Every field, framed by length; ``decode`` reads it."""
        shard = self.shard
        return frame(
            [
                _MAGIC,
                _of_int(self.format_version),
                self.model_config.encode("utf-8", "surrogatepass"),
                self.weights,
                self.layout.descriptor,
                self.scale_format.encode("utf-8", "surrogatepass"),
                _of_int(shard.tp_rank),
                _of_int(shard.tp_size),
                _of_int(shard.pp_rank),
                _of_int(shard.pp_size),
                _of_optional(self.lora),
                _of_optional(self.salt),
            ]
        )

    @property
    def digest(self) -> NamespaceDigest:
        """SHA-256 of the descriptor. A few microseconds: keep it where it is asked often."""
        return NamespaceDigest(sha256(self.descriptor).digest())

    @classmethod
    def decode(cls, descriptor: bytes) -> "Namespace":
        """Return the namespace that has this descriptor; raise ``InputError`` where none has."""
        magic, *fields = unframe(descriptor) or [b""]
        if magic != _MAGIC or len(fields) != 11:
            raise InputError("no description of a namespace")
        try:
            namespace = cls(
                format_version=int(fields[0]),
                model_config=fields[1].decode("utf-8", "surrogatepass"),
                weights=fields[2],
                layout=KVLayout.decode(fields[3]),
                scale_format=fields[4].decode("utf-8", "surrogatepass"),
                shard=Shard(*(int(field) for field in fields[5:9])),
                lora=_optional(fields[9]),
                salt=_optional(fields[10]),
            )
        except (ValueError, ConfigError) as error:
            raise InputError(f"no description of a namespace: {error}") from None
        if namespace.descriptor != descriptor:
            raise InputError("no description of a namespace: it is not in canonical form")
        return namespace


def salt_digest(salt: str) -> bytes:
    """Return what a namespace keeps of a tenant's salt."""
    return sha256(salt.encode("utf-8", "surrogatepass")).digest()


def canonical_config(config: Mapping[str, object]) -> str:
    """Return a model's config as JSON that is equal for equal configs.

    Leaves out where the model was found and which library wrote the file.
    """
    kept = {name: value for name, value in config.items() if name not in _NOT_IDENTITY}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def weights_fingerprint(directory: Path) -> bytes:
    """Return 32 bytes that differ for other weights.

    Taken from every ``*.safetensors`` file: its name, size, header, and samples of each tensor
    at fixed places. Files that have not changed (path, time, size) are not read again in this
    process. A few milliseconds a thousand tensors.

    Raises ``InputError`` where there are no such files or one is malformed.
    """
    files = sorted(directory.glob("*.safetensors"), key=lambda path: path.name)
    if not files:
        raise InputError(f"{directory}: there is no *.safetensors file")
    parts: list[bytes] = []
    for path in files:
        try:
            stat = path.stat()
            parts += [os.fsencode(path.name), _of_file(path, stat.st_mtime_ns, stat.st_size)]
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
    return sha256(frame(parts)).digest()


@lru_cache(maxsize=4096)
def _of_file(path: Path, mtime_ns: int, nbytes: int) -> bytes:
    """Return the digest of one safetensors file; ``mtime_ns`` only tells versions apart."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER_NBYTES, nbytes - 8):
            raise InputError(f"{path}: no safetensors file (its header does not fit into it)")
        header = file.read(length)
        parts = [_of_int(nbytes), header]
        for start, end in _tensors(path, header):
            for offset in _sample_offsets(start, end):
                file.seek(8 + length + offset)
                parts.append(file.read(min(_SAMPLE_NBYTES, end - offset)))
    return sha256(frame(parts)).digest()


def _tensors(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Return where each tensor starts and ends, from the end of the header on."""
    try:
        found: list[tuple[int, int]] = []
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found.append((int(start), int(end)))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path}: no safetensors file (its header cannot be read)") from None
    return sorted(found)


def _sample_offsets(start: int, end: int) -> list[int]:
    """Return where to sample a tensor: at its start, its end, and evenly between them."""
    room = max(0, end - start - _SAMPLE_NBYTES)
    steps = _SAMPLES_PER_TENSOR - 1
    return sorted({start + room * step // steps for step in range(_SAMPLES_PER_TENSOR)})


def _of_int(value: int) -> bytes:
    return str(value).encode()


def _of_optional(value: bytes | None) -> bytes:
    """Frame a value or its absence, which is not the empty value."""
    return frame([] if value is None else [value])


def _optional(field: bytes) -> bytes | None:
    values = unframe(field)
    if len(values) > 1:
        raise InputError("no description of a namespace: an optional field has several values")
    return values[0] if values else None
