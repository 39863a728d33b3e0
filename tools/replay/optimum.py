"""What no cache can beat: one without end, and Belady's MIN of a given size.

Both work on *runs*, the pages between two branches or ends of requests, which are always used
together: cost follows requests and new pages, not the pages referred to.
"""

import heapq
import math
from dataclasses import dataclass, replace

from hicache.keys import NamespaceDigest
from hicache.tools.replay.workload import Workload
from hicache.tree import HiRadixTree, Node


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the requests of a workload have in common."""

    seen: list[int]
    """Leading pages of each request that an earlier one left behind."""
    kept: list[int]
    """Leading pages of each request that can be found at all."""
    num_unique_pages: int
    longest_pages: int
    ends: list[Node]
    """The last run that each request leaves behind; the runs above it are its path."""


def find_sharing(workload: Workload) -> Sharing:
    """Put all requests in trees, one after the other. O(requests, their runs and new pages)."""
    trees: dict[NamespaceDigest, HiRadixTree] = {}
    sharing = Sharing([], [], 0, 0, [])
    num_unique, longest = 0, 0
    for job in workload.jobs:
        tree = trees.get(job.namespace)
        if tree is None:
            tree = trees[job.namespace] = HiRadixTree(job.namespace, workload.page_grains)
        prompt = job.tokens[: job.num_kept_pages * tree.page_nbytes]
        node = tree.locate(prompt)
        sharing.seen.append(node.end)
        sharing.kept.append(job.num_kept_pages)
        num_unique += job.num_pages - job.num_kept_pages  # an unfinished page, seen by nobody
        if node.end < job.num_kept_pages or job.output:
            left = prompt + job.output
            node = tree.locate(left)
            if rest := left[node.end * tree.page_nbytes :]:
                num_unique += len(rest) // tree.page_nbytes
                node = tree.add(node, rest, 0.0)
        sharing.ends.append(node)
        longest = max(longest, job.num_pages + len(job.output) // tree.page_nbytes)
    return replace(sharing, num_unique_pages=num_unique, longest_pages=longest)


def belady(sharing: Sharing, capacity: float) -> list[int]:
    """Return the leading pages that each request hits in a cache of ``capacity`` pages that knows
    the future: what is used last from now on leaves first, tails before heads.

    Every page that is computed is in the cache at that moment, as in any tier that is computed in:
    one that is not worth its place takes it until the next one comes.
    """
    paths = [end.path() for end in sharing.ends]
    cache = _Clairvoyant(capacity)
    hits: list[int] = []
    for path, uses, num_kept in zip(paths, _next_uses(paths), sharing.kept, strict=True):
        hits.append(min(num_kept, _leading(path, cache.resident)))
        for node, use in zip(path, uses, strict=True):
            cache.use(node, use)
    return hits


class _Clairvoyant:
    """Belady's cache, a run at a time."""

    def __init__(self, capacity: float) -> None:
        self.resident: dict[Node, int] = {}
        """Leading pages of each run that are in the cache."""
        self._num_free = capacity
        self._next_use: dict[Node, float] = {}
        self._heap: list[tuple[float, int, int, Node]] = []
        """(-next use, -first page, number of the entry, run); those that are out of date stay."""
        self._num_entries = 0
        self._num_passing = 0
        """1 while a page is in the cache only because it was the last one computed."""

    def use(self, node: Node, use: float) -> None:
        """Have a run in the cache as far as it is worth it, to be used next at ``use``."""
        before = self.resident.get(node, 0)
        self._next_use[node] = use
        if missing := node.num_pages - before:
            self._num_free += self._num_passing
            self._num_passing = 0
            self._make_room(missing, use)
            taken = int(min(missing, self._num_free))
            self._num_free -= taken
            self.resident[node] = before + taken
            self._enter(node, use)
            if taken < missing:
                self._make_room(1, -1.0)
                self._num_passing = int(min(1, self._num_free))
                self._num_free -= self._num_passing
        else:
            self._enter(node, use)

    def _enter(self, node: Node, use: float) -> None:
        self._num_entries += 1
        heapq.heappush(self._heap, (-use, -node.start, self._num_entries, node))

    def _make_room(self, num_pages: int, use: float) -> None:
        """Evict what is used later than ``use``, the last first, until so many pages are free."""
        heap, resident = self._heap, self.resident
        while self._num_free < num_pages and heap:
            victim_use, _, _, victim = heap[0]
            if self._next_use[victim] != -victim_use or not resident[victim]:
                heapq.heappop(heap)
            elif -victim_use <= use:
                return
            else:
                num_evicted = int(min(resident[victim], num_pages - self._num_free))
                resident[victim] -= num_evicted
                self._num_free += num_evicted


def _leading(path: list[Node], resident: dict[Node, int]) -> int:
    """Count the leading pages of a path that are resident."""
    num_pages = 0
    for node in path:
        here = resident.get(node, 0)
        num_pages += here
        if here < node.num_pages:
            break
    return num_pages


def _next_uses(paths: list[list[Node]]) -> list[list[float]]:
    """Return for each run of each request which request uses it next."""
    last: dict[Node, float] = {}
    following: list[list[float]] = []
    for index in range(len(paths) - 1, -1, -1):
        path = paths[index]
        following.append([last.get(node, math.inf) for node in path])
        for node in path:
            last[node] = index
    following.reverse()
    return following
