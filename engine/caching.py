"""What the engine asks of a cache: the calls of ``HiCache``, and who else answers them.

The engine knows no more of the cache than this file. ``HiCache`` shares pages between requests
and keeps them in three tiers; ``PrivatePages`` shares nothing. All calls come from the step
thread, but for ``wake`` and ``stats``.
"""

import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from hicache.actions import HitTokens, Refuse, Wait
from hicache.cache import CacheStats, Lease, Polled
from hicache.config import CacheConfig
from hicache.events import RequestId
from hicache.keys import NamespaceDigest
from hicache.layout import KVLayout
from hicache.namespace import Namespace


class Cache(Protocol):
    """Pages of KV in L1, and whatever knows how to fill them without computing."""

    @property
    def device_pages(self) -> Tensor:
        """L1, ``[N, *page_shape]``: the engine reads and writes KV here."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        ...

    def open_namespace(self, namespace: Namespace) -> NamespaceDigest:
        """Return its digest, under which requests are made from now on."""
        ...

    def match(self, namespace: NamespaceDigest, tokens: bytes) -> HitTokens:
        """Return what a request for these tokens would hit now. Changes nothing."""
        ...

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
        """Announce a request, exactly once, so that its pages may be fetched ahead.

        ``continues``: the id under which it came first, where it was preempted and comes again.
        """
        ...

    def acquire(self, request: RequestId, num_tokens_ahead: int) -> Lease | Wait | Refuse:
        """Lease what it hits, with slots for that many tokens beyond, at most to their end."""
        ...

    def extend(self, lease: Lease, num_pages: int) -> bool:
        """Make it ``num_pages`` slots in all; False: not now."""
        ...

    def commit(self, lease: Lease, tokens: bytes) -> None:
        """Share the next pages after those committed: a whole number of pages, packed."""
        ...

    def release(self, request: RequestId) -> None:
        """Give back all that a request has or waits for."""
        ...

    def poll(self) -> Polled:
        """Take note of what has finished. Once a step; never blocks."""
        ...

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Say how long it took to compute so many prompt tokens."""
        ...

    def flush(self, timeout_s: float | None) -> None:
        """Empty L1 and L2, once what they hold is written down or the time is over."""
        ...

    def wait_for_progress(self, timeout_s: float) -> None:
        """Sleep until there may be something to poll, or somebody calls ``wake``."""
        ...

    def wake(self) -> None:
        """End a ``wait_for_progress`` at once, or the next one. Any thread."""
        ...

    def stats(self) -> CacheStats | None:
        """Return a snapshot of what it has done; None where it counts nothing. Any thread."""
        ...

    def describe(self) -> list[str]:
        """Return what it uses, in a few lines for people."""
        ...

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write down what is dirty, and end all threads; False where one hangs."""
        ...


OpenCache = Callable[[KVLayout, CacheConfig, str], Cache]
"""Makes a cache: of that layout, with those settings, L1 on that device."""


class TimedCache:
    """A cache that adds up what its calls cost the step thread."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.seconds = 0.0
        """CPU time of this thread inside ``match``, ``prefetch``, ``acquire``, ``extend``,
        ``commit``, ``release`` and ``poll``."""

    def match(self, namespace: NamespaceDigest, tokens: bytes) -> HitTokens:
        """As the cache's."""
        started = time.thread_time()
        hit = self.cache.match(namespace, tokens)
        self.seconds += time.thread_time() - started
        return hit

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
        """As the cache's."""
        started = time.thread_time()
        self.cache.prefetch(
            request,
            namespace,
            tokens,
            max_hit_tokens=max_hit_tokens,
            priority=priority,
            continues=continues,
        )
        self.seconds += time.thread_time() - started

    def acquire(self, request: RequestId, num_tokens_ahead: int) -> Lease | Wait | Refuse:
        """As the cache's."""
        started = time.thread_time()
        answer = self.cache.acquire(request, num_tokens_ahead)
        self.seconds += time.thread_time() - started
        return answer

    def extend(self, lease: Lease, num_pages: int) -> bool:
        """As the cache's."""
        started = time.thread_time()
        has_grown = self.cache.extend(lease, num_pages)
        self.seconds += time.thread_time() - started
        return has_grown

    def commit(self, lease: Lease, tokens: bytes) -> None:
        """As the cache's."""
        started = time.thread_time()
        self.cache.commit(lease, tokens)
        self.seconds += time.thread_time() - started

    def release(self, request: RequestId) -> None:
        """As the cache's."""
        started = time.thread_time()
        self.cache.release(request)
        self.seconds += time.thread_time() - started

    def poll(self) -> Polled:
        """As the cache's."""
        started = time.thread_time()
        polled = self.cache.poll()
        self.seconds += time.thread_time() - started
        return polled
