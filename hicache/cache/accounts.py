"""What has happened to pages, added up for metrics and told for people.

The planner's facts are the one source of both.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache.actions import Fact, HitTokens, Tier
from hicache.events import RequestId
from hicache.store import StoreStats

_MAX_EXPLAINED = 1000
"""Requests whose facts are kept."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of a cache. Counts start with it, and only grow."""

    page_size: int
    page_nbytes: int
    num_pages: Mapping[Tier, int]
    """Capacity of L1 and L2."""
    num_used_pages: Mapping[Tier, int]
    pages: Mapping[tuple[str, str, str], int]
    """Pages by (what happened, tier, reason), as ("evicted", "host", "room")."""
    hit_tokens: HitTokens
    num_requests: int
    """Requests that were granted."""
    num_operations: int
    """Copies, probes, fetches and stores in flight."""
    num_namespaces: int
    store: StoreStats | None


class Accounts:
    """Adds facts up. Belongs to the step thread; snapshots may be taken from any."""

    def __init__(self) -> None:
        self.pages: Counter[tuple[str, str, str]] = Counter()
        self.hit_tokens = HitTokens()
        self.num_requests = 0
        self._by_request: OrderedDict[RequestId, list[Fact]] = OrderedDict()

    def add(self, facts: Iterable[Fact]) -> None:
        """Count facts, and file those of a request with it."""
        for fact in facts:
            self.pages[fact.kind, fact.tier, fact.reason] += fact.num_pages
            if fact.request is not None:
                if fact.request not in self._by_request:
                    self._by_request[fact.request] = []
                    if len(self._by_request) > _MAX_EXPLAINED:
                        self._by_request.popitem(last=False)
                self._by_request[fact.request].append(fact)

    def granted(self, hit: HitTokens) -> None:
        """Count a request and what it hit."""
        seen = self.hit_tokens
        self.num_requests += 1
        self.hit_tokens = HitTokens(
            seen.device + hit.device, seen.host + hit.host, seen.storage + hit.storage
        )

    def explain(self, request: RequestId) -> list[str]:
        """Return what is remembered of a request, a line for each thing that happened."""
        lines = []
        for fact in self._by_request.get(request, []):
            reason = f" ({fact.reason.replace('_', ' ')})" if fact.reason else ""
            lines.append(f"{fact.num_pages} pages {fact.kind} in {fact.tier}{reason}")
        return lines
