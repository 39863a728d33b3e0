"""Namespaces in words, and finding the one that somebody means."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from hicache.codec import decode_namespace
from hicache.errors import CorruptPage, InputError
from hicache.keys import NamespaceDigest, PageKey
from hicache.namespace import Namespace
from hicache.storage import StorageBackend
from hicache.tools.store import reading

SHORT = 8
"""Digits of a digest that people are shown; they may give as few as four."""
_LEAST = 4
_ROOM_NBYTES = 64 << 10
_NO_CONFIG: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Named:
    """A namespace, and its description where the store has it."""

    digest: NamespaceDigest
    namespace: Namespace | None

    @property
    def short(self) -> str:
        """Its digest, as people are shown it."""
        return self.digest.hex()[:SHORT]

    @property
    def model(self) -> str:
        """What it is for, in a few words."""
        if self.namespace is None:
            return "(no description)"
        layout = self.namespace.layout
        heads = "latent" if layout.kind == "mla" else f"{layout.num_kv_heads} KV"
        family = _family(self.namespace.model_config)
        shape = f"{layout.num_layers} layers x {heads} x {layout.head_dim}"
        return f"{family}, {shape}, {layout.dtype}"

    @property
    def details(self) -> list[str]:
        """What tells it from others of the same model, in lines."""
        if self.namespace is None:
            return []
        namespace, shard = self.namespace, self.namespace.shard
        page_size = namespace.layout.page_size
        lines = [f"pages of {page_size} tokens, weights {namespace.weights.hex()[:SHORT]}"]
        if namespace.salt is not None:
            lines.append(f"tenant {namespace.salt.hex()[:SHORT]}")
        if namespace.lora is not None:
            lines.append(f"adapter {namespace.lora.hex()[:SHORT]}")
        if namespace.scale_format != "none":
            lines.append(f"scales {namespace.scale_format}")
        if shard.tp_size > 1 or shard.pp_size > 1:
            ranks = (shard.tp_rank, shard.tp_size, shard.pp_rank, shard.pp_size)
            lines.append("shard {} of {}, stage {} of {}".format(*ranks))
        return lines

    def as_json(self) -> dict[str, object]:
        """Return what machines are told of it."""
        found: dict[str, object] = {"namespace": self.digest.hex()}
        if self.namespace is not None:
            namespace, layout = self.namespace, self.namespace.layout
            found |= {
                "model": self.model,
                "page_size": layout.page_size,
                "page_nbytes": layout.page_nbytes,
                "dtype": layout.dtype,
                "weights": namespace.weights.hex(),
                "tenant": None if namespace.salt is None else namespace.salt.hex(),
            }
        return found


async def name(
    backend: StorageBackend, digests: Sequence[NamespaceDigest]
) -> dict[NamespaceDigest, Named]:
    """Return each namespace with its description, where the store has it and it is true."""
    records = await reading.heads(backend, [PageKey(one) for one in digests], _ROOM_NBYTES)
    return {
        digest: Named(digest, described(digest, record))
        for digest, record in zip(digests, records, strict=True)
    }


def described(digest: NamespaceDigest, record: bytes | None) -> Namespace | None:
    """Return the namespace that a record describes; ``None`` where it does not."""
    try:
        return None if record is None else Namespace.decode(decode_namespace(digest, record))
    except (CorruptPage, InputError):
        return None


def select(names: Iterable[Named], text: str) -> Named:
    """Return the namespace whose digest begins so. Raises ``InputError`` where none or two do."""
    wanted = text.lower()
    found = [one for one in names if one.digest.hex().startswith(wanted)]
    if len(wanted) < _LEAST:
        raise InputError(f"namespace {text}: give {_LEAST} or more digits")
    if not found:
        raise InputError(f"namespace {text}: there is none in this store")
    if len(found) > 1:
        raise InputError(f"namespace {text}: {len(found)} begin so; give more digits")
    return found[0]


def of_tenant(names: Iterable[Named], salt: str) -> list[Named]:
    """Return the namespaces of a tenant. Raises ``InputError`` where there is none."""
    digest = sha256(salt.encode("utf-8", "surrogatepass")).digest()
    found = [one for one in names if one.namespace and one.namespace.salt == digest]
    if not found:
        raise InputError("tenant: there is no namespace with this salt in this store")
    return found


def _family(config: str) -> str:
    """Return what kind of model a config is of."""
    try:
        found = json.loads(config)
    except ValueError:
        found = _NO_CONFIG
    fields = found if isinstance(found, dict) else _NO_CONFIG
    return str(fields.get("model_type") or next(iter(fields.get("architectures") or ()), "model"))
