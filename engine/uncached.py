"""Pages without a cache: each request has its own, and computes all of them.

Answers the calls of ``hicache.engine.caching.Cache``. It is what "the same turns without any
cache" means, and what the engine is tested with where the cache is not the question.
"""

from array import array

import torch

from hicache.actions import HitTokens, Refuse, Wait
from hicache.cache import CacheStats, Lease, Polled
from hicache.config import CacheConfig
from hicache.errors import ConfigError
from hicache.events import OpId, RequestId
from hicache.keys import TOKEN_NBYTES, NamespaceDigest
from hicache.layout import KVLayout
from hicache.machine import available_nbytes
from hicache.namespace import Namespace
from hicache.sizes import Size

NO_NAMESPACE = NamespaceDigest(b"")


class PrivatePages:
    """L1 and a list of its free pages."""

    def __init__(self, layout: KVLayout, num_pages: int, device: str = "cpu") -> None:
        self.device_pages = torch.zeros(
            (num_pages, *layout.page_shape), dtype=getattr(torch, layout.dtype), device=device
        )
        self.page_size = layout.page_size
        self._free = array("i", range(num_pages - 1, -1, -1))
        self._num_tokens: dict[RequestId, int] = {}
        self._leases: dict[RequestId, Lease] = {}

    @classmethod
    def open(cls, layout: KVLayout, config: CacheConfig, device: str) -> "PrivatePages":
        """Return an L1 of the configured size; ``auto`` is 1/8 of the memory that is left."""
        text = config.device.size
        if text == "none":
            raise ConfigError("cache.device.size: there is no engine without L1")
        if text == "auto":
            num_pages = available_nbytes() // 8 // layout.page_nbytes
        else:
            num_pages = Size.parse(text).num_pages(layout.page_size, layout.page_nbytes)
        if num_pages < 1:
            raise ConfigError(f"cache.device.size: {text} is less than one page")
        return cls(layout, num_pages, device)

    @property
    def num_free_pages(self) -> int:
        """Pages that no request has."""
        return len(self._free)

    def open_namespace(self, namespace: Namespace) -> NamespaceDigest:
        """Return its digest; all namespaces are alike here."""
        return namespace.digest

    def match(self, namespace: NamespaceDigest, tokens: bytes) -> HitTokens:
        """Return no hit."""
        return HitTokens()

    def prefetch(
        self,
        request: RequestId,
        namespace: NamespaceDigest,
        tokens: bytes,
        *,
        max_hit_tokens: int,
        priority: int = 0,
        continues: RequestId | None = None,
    ) -> None:
        """Remember how long it is."""
        assert request not in self._num_tokens
        self._num_tokens[request] = len(tokens) // TOKEN_NBYTES

    def acquire(self, request: RequestId, num_tokens_ahead: int) -> Lease | Wait | Refuse:
        """Lease fresh pages for that many tokens, at most to the end of its tokens."""
        num_tokens = self._num_tokens[request]
        if self._pages(num_tokens) > len(self.device_pages):
            return Refuse(request, f"{num_tokens} tokens do not fit into L1")
        lease = Lease(
            request=request,
            namespace=NO_NAMESPACE,
            slots=array("i"),
            hit=HitTokens(),
            num_committed_pages=0,
            num_valid_tokens=0,
            loads=set(),
            wait_for_load=_nothing_to_wait_for,
            confirm=_nothing_to_confirm,
        )
        if not self._grow(lease, self._pages(min(num_tokens_ahead, num_tokens))):
            return Wait(request, "device_full")
        self._leases[request] = lease
        return lease

    def extend(self, lease: Lease, num_pages: int) -> bool:
        """Add fresh pages, all that are missing or none."""
        return self._grow(self._leases[lease.request], num_pages)

    def commit(self, lease: Lease, tokens: bytes) -> None:
        """Count pages as committed; nobody else will find them."""
        page_nbytes = self.page_size * TOKEN_NBYTES
        assert len(tokens) % page_nbytes == 0
        mine = self._leases[lease.request]
        mine.num_committed_pages += len(tokens) // page_nbytes
        assert mine.num_committed_pages <= len(mine.slots)

    def release(self, request: RequestId) -> None:
        """Free its pages."""
        self._num_tokens.pop(request, None)
        lease = self._leases.pop(request, None)
        if lease is not None:
            self._free.extend(reversed(lease.slots))

    def poll(self) -> Polled:
        """Return that nothing happened."""
        return Polled()

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Take no interest."""

    def flush(self, timeout_s: float | None) -> None:
        """Do nothing: there is nothing that no request needs."""

    def wait_for_progress(self, timeout_s: float) -> None:
        """Return at once: nothing is ever in flight."""

    def wake(self) -> None:
        """Do nothing: nobody sleeps."""

    def stats(self) -> CacheStats | None:
        """Return nothing: there is nothing to count."""
        return None

    def describe(self) -> list[str]:
        """Return what it uses, in a few lines for people."""
        return [f"L1 device   {len(self.device_pages):,} private pages, nothing is cached"]

    def close(self, timeout_s: float = 30.0) -> bool:
        """Do nothing: nothing runs."""
        return True

    def check(self) -> None:
        """Assert that every page is free or has one owner."""
        owned = [slot for lease in self._leases.values() for slot in lease.slots]
        assert sorted([*owned, *self._free]) == list(range(len(self.device_pages)))

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _grow(self, lease: Lease, num_pages: int) -> bool:
        num_missing = num_pages - len(lease.slots)
        if num_missing > len(self._free):
            return False
        lease.slots.extend(self._free.pop() for _ in range(num_missing))
        return True


def _nothing_to_wait_for(op: OpId, layer: int) -> int:
    raise AssertionError("nothing is ever loaded")


def _nothing_to_confirm(lease: Lease) -> None:
    raise AssertionError("nothing is ever loaded")
