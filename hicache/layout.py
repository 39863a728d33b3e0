"""What a page of KV looks like: its shape, its bytes, and what tells it from another layout.

Shapes: ``L`` layers, ``S`` tokens per page, ``H`` key-value heads, ``D`` head size. A page is
``[L, 2, S, H, D]`` (key, value) for ordinary attention and ``[L, S, D]`` for latent attention,
always contiguous and always with layers first, so that a range of layers of one page is one
stretch of memory.

Only this file, the pools and the engine know what is inside a page; everything else moves
``page_nbytes`` bytes. Layers of another kind (sliding windows, recurrent states) will be further
groups of a layout, each with pages of its own shape; their pools and copies work as these do.
"""

from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Literal, cast, get_args

from hicache.errors import ConfigError, InputError
from hicache.framing import frame, unframe

Kind = Literal["mha", "mla"]
"""mha: key and value of every head; mla: one latent (and its rotary part) for all heads."""

ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of one element, by the name of its dtype in torch."""

MAX_DIMENSION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The form of every page of one model at one page size."""

    num_layers: int
    num_kv_heads: int
    """1 for ``mla``."""
    head_dim: int
    """For ``mla``: latent and rotary part together."""
    dtype: str
    """A key of ``ITEM_NBYTES``."""
    page_size: int
    """Tokens a page."""
    kind: Kind = "mha"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if not 0 < value <= MAX_DIMENSION:
                raise ConfigError(f"layout: {name} must be from 1 to {MAX_DIMENSION}, not {value}")
        if self.dtype not in ITEM_NBYTES:
            raise ConfigError(f"layout: dtype {self.dtype!r} is none of {', '.join(ITEM_NBYTES)}")
        if self.kind not in get_args(Kind):
            raise ConfigError(f"layout: kind {self.kind!r} is none of {', '.join(get_args(Kind))}")
        if self.kind == "mla" and self.num_kv_heads != 1:
            raise ConfigError("layout: mla has one latent for all heads: num_kv_heads must be 1")

    @property
    def page_shape(self) -> tuple[int, ...]:
        """``[L, 2, S, H, D]``, or ``[L, S, D]`` for ``mla``: layers are always dim 0."""
        if self.kind == "mla":
            return (self.num_layers, self.page_size, self.head_dim)
        return (self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def token_nbytes(self) -> int:
        """Bytes of KV that one token has in all layers."""
        per_layer = self.head_dim if self.kind == "mla" else 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * per_layer * ITEM_NBYTES[self.dtype]

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page, in every tier."""
        return self.page_size * self.token_nbytes

    @property
    def descriptor(self) -> bytes:
        """All that is said above, framed; ``decode`` reads it."""
        return frame(
            [
                part
                for field in fields(self)
                for part in (field.name.encode(), str(getattr(self, field.name)).encode())
            ]
        )

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal only for equal layouts."""
        return sha256(self.descriptor).digest()

    @classmethod
    def decode(cls, descriptor: bytes) -> "KVLayout":
        """Return the layout that has this descriptor; raise ``InputError`` where none has."""
        parts = unframe(descriptor)
        try:
            values = {
                name.decode(): value.decode()
                for name, value in zip(parts[::2], parts[1::2], strict=True)
            }
            layout = cls(
                num_layers=int(values["num_layers"]),
                num_kv_heads=int(values["num_kv_heads"]),
                head_dim=int(values["head_dim"]),
                dtype=values["dtype"],
                page_size=int(values["page_size"]),
                kind=cast(Kind, values["kind"]),
            )
        except (ValueError, KeyError, ConfigError) as error:
            raise InputError(f"no description of a layout: {error}") from None
        if layout.descriptor != descriptor:
            raise InputError("no description of a layout: it has unknown fields")
        return layout
