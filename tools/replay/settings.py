"""What one replay is told: tiers, policies, and how fast everything is.

Knows how these are written; nothing of traces or of how they are replayed.
"""

import importlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hicache.config import DeviceConfig
from hicache.errors import ConfigError
from hicache.eviction import POLICIES as RANKS
from hicache.eviction import Rank
from hicache.prefetch import BestEffort, PrefetchPolicy, Timeout, WaitComplete
from hicache.sizes import Size
from hicache.writing import ADMISSION, WritePolicy
from hicache.writing import POLICIES as WRITING

PREFETCH: Mapping[str, PrefetchPolicy] = {
    "best_effort": BestEffort(),
    "wait_complete": WaitComplete(),
    "timeout": Timeout(0.1, 0.05),
}
"""By name."""

DEFAULT_LOW_WATER = DeviceConfig().low_water
"""Share of L1 that the server keeps free by default."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One way between two tiers: copies take turns; each arrives ``latency_s`` after its turn."""

    nbytes_per_s: float = math.inf
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hops:
    """All ways between tiers."""

    load: Hop = Hop()
    """L2 to L1."""
    back_up: Hop = Hop()
    """L1 to L2."""
    fetch: Hop = Hop()
    """L3 to L2; its latency is also that of a probe."""
    store: Hop = Hop()
    """L2 to L3."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. Sizes are texts as people write them, ``inf``, or ``none`` for no such tier."""

    l1: str = "inf"
    l2: str = "none"
    l3: str = "none"
    eviction: str = "lru"
    host_eviction: str | None = None
    """None: as in L1."""
    write: str = "write_through"
    admission: str = "first"
    """Which pages storage takes."""
    prefetch: str = "best_effort"
    page_size: int | None = None
    """Tokens a page; None: the trace's block."""
    token_nbytes: int = 131_072
    model: str = "llama-3.1-8b"
    """What ``token_nbytes`` was taken from."""
    is_sequential: bool = False
    """Each request ends before the next begins, and every copy takes no time."""
    concurrency: int = 256
    """Requests that run at once."""
    prefill_tokens_per_s: float = math.inf
    decode_tokens_per_s: float = math.inf
    """Of one request: how long its pages stay leased behind its prefill."""
    layer_groups: int = 4
    """Parts in which a load reaches the layers, so that the first compute while others arrive;
    1: computing begins when all is there, as on a CPU."""
    low_water: float = DEFAULT_LOW_WATER
    """Share of L1 kept free where eviction needs copies; 0 in a sequential run."""
    hops: Hops = field(default_factory=Hops)
    outputs: bool | None = None
    """Whether what was generated stays in the cache, as a server's does; None: in a timed run."""
    warm_up: float = 0.1
    """Leading share of the requests that is shown apart."""
    has_min: bool = False
    """Whether Belady's MIN is worked out, too."""

    @property
    def has_outputs(self) -> bool:
        """Whether a workload for these settings has outputs, where its trace tells of them."""
        return not self.is_sequential if self.outputs is None else self.outputs

    def with_value(self, name: str, text: str) -> "Settings":
        """Return these settings with one of them changed, as a sweep names it; not checked yet."""
        if name in ("l1_gb", "l2_gb", "l3_gb"):
            return self.with_value(name[:2], text if text in ("inf", "none") else f"{text}GB")
        texts = ("l1", "l2", "l3", "eviction", "host_eviction", "write", "admission", "prefetch")
        changed: dict[str, Any]
        if name in texts:
            changed = {name: text}
        elif name in ("page_size", "concurrency", "layer_groups"):
            if not text.isdecimal():
                raise ConfigError(f"--sweep {name}: {text!r} is no whole number")
            changed = {name: int(text)}
        elif name == "prefill_rate":
            changed = {"prefill_tokens_per_s": _number(name, text)}
        else:
            known = ", ".join(["l1_gb", "l2_gb", "l3_gb", *texts, "page_size", "concurrency"])
            raise ConfigError(f"--sweep {name}: not one of {known}, layer_groups, prefill_rate")
        return replace(self, **changed)

    def check(self) -> None:
        """Raise ``ConfigError`` in one line for what cannot be."""
        rank(self.eviction)
        rank(self.host_eviction or self.eviction)
        writing(self.write)
        min_store_users(self.admission)
        prefetching(self.prefetch)
        for size in (self.l1, self.l2, self.l3):
            parse_size(size)
        if parse_size(self.l1) is None:
            raise ConfigError("--l1: a replay needs an L1; inf is one")
        if parse_size(self.l2) is None and parse_size(self.l3) is not None:
            raise ConfigError("--l3: storage is reached through L2; give --l2 a size")
        if self.page_size is not None and self.page_size < 1:
            raise ConfigError(f"--page-size must be at least 1, not {self.page_size}")
        if self.concurrency < 1:
            raise ConfigError(f"--concurrency must be at least 1, not {self.concurrency}")
        if self.layer_groups < 1:
            raise ConfigError(f"--layer-groups must be at least 1, not {self.layer_groups}")
        rates = [self.prefill_tokens_per_s, self.decode_tokens_per_s]
        rates += [hop.nbytes_per_s for hop in self._hops().values()]
        if not all(rate > 0 for rate in rates):
            raise ConfigError("rates and bandwidths must be more than 0")
        if not all(math.isfinite(hop.latency_s) for hop in self._hops().values()):
            raise ConfigError("latencies must be finite")

    def describe(self) -> dict[str, object]:
        """Return the settings as a report has them."""
        return {
            "l1": self.l1, "l2": self.l2, "l3": self.l3,
            "eviction": self.eviction,
            "host_eviction": self.host_eviction or self.eviction,
            "write": self.write,
            "admission": self.admission,
            "prefetch": self.prefetch,
            "page_size": self.page_size,
            "model": self.model,
            "token_nbytes": self.token_nbytes,
            "is_sequential": self.is_sequential,
            "concurrency": 1 if self.is_sequential else self.concurrency,
            "layer_groups": self.layer_groups,
            "low_water": 0.0 if self.is_sequential else self.low_water,
            "prefill_tokens_per_s": finite(self.prefill_tokens_per_s),
            "decode_tokens_per_s": finite(self.decode_tokens_per_s),
            "hops": {
                name: {"nbytes_per_s": finite(hop.nbytes_per_s), "latency_s": hop.latency_s}
                for name, hop in self._hops().items()
            },
        }  # fmt: skip

    def _hops(self) -> dict[str, Hop]:
        hops = Hops() if self.is_sequential else self.hops
        return {
            "load": hops.load, "back_up": hops.back_up, "fetch": hops.fetch, "store": hops.store,
        }  # fmt: skip


def finite(value: float) -> float | None:
    """Return a value that JSON can hold: None stands for without end."""
    return None if math.isinf(value) else value


def parse_size(text: str) -> Size | float | None:
    """Return a size, infinity, or None where there is no such tier."""
    if text == "none":
        return None
    return math.inf if text == "inf" else Size.parse(text)


def rank(name: str) -> Rank:
    """Return an eviction policy by name, or by import path."""
    found: Rank = _find("eviction", name, RANKS)
    if not callable(found):
        raise ConfigError(f"--eviction {name}: must be a function from a node to its rank")
    return found


def writing(name: str) -> WritePolicy:
    """Return a write policy by name, or by import path."""
    found: WritePolicy = _find("write", name, WRITING)
    if not isinstance(found, WritePolicy):
        raise ConfigError(f"--write {name}: must be a hicache.writing.WritePolicy")
    return found


def min_store_users(name: str) -> int:
    """Return how many requests must have used a page before storage takes it."""
    if name not in ADMISSION:
        raise ConfigError(f"--admission {name}: not one of {', '.join(ADMISSION)}")
    return ADMISSION[name]


def prefetching(name: str) -> PrefetchPolicy:
    """Return a prefetch policy by name, or by import path."""
    found: PrefetchPolicy = _find("prefetch", name, PREFETCH)
    if not callable(getattr(found, "patience_s", None)):
        raise ConfigError(f"--prefetch {name}: must have the method patience_s")
    return found


def _find(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    if ":" not in name:
        if name not in known:
            raise ConfigError(
                f"--{kind} {name}: not one of {', '.join(known)}; write package.module:name for "
                "one of your own"
            )
        return known[name]
    module, _, attribute = name.partition(":")
    if not {"", os.getcwd()} & set(sys.path):  # a script that is installed does not look here
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--{kind} {name}: {error}") from None
    return found() if isinstance(found, type) else found


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--sweep {name}: {text!r} is no number") from None
