"""A bounded memory of pages that are nowhere any more: why they left, and who had used them.

So that a miss can be explained, and so that a page that comes again is known to be used twice.
"""

from collections import OrderedDict
from typing import Literal

from hicache.keys import KEY_NBYTES, chain
from hicache.planner.config import PlannerConfig
from hicache.tree import Node

Cause = Literal["device", "host", "storage", "forgotten"]
"""The tier that had a page last, or the operator who wanted it gone."""

_NBYTES = 12
"""Of a page key, kept to know the page again."""

_SEVERAL = -1
"""In place of the one request that has used a page: there were more, or storage had it."""


class Ghosts:
    """Why pages left and who had used them, by key; the oldest are forgotten first."""

    def __init__(self, config: PlannerConfig) -> None:
        self._limit = config.num_ghosts
        self._min_users = config.min_store_users
        self._pages: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self._reason_of: dict[Cause, str] = {
            "device": "not_written_down" if config.host_pages else "evicted_from_device",
            "host": "not_written_down" if config.has_storage else "evicted_from_host",
            "storage": "evicted_from_storage",
            "forgotten": "forgotten",
        }

    @property
    def num_pages(self) -> int:
        """Pages that are remembered."""
        return len(self._pages)

    def remember(self, node: Node, first: int, cause: Cause) -> None:
        """Note that the pages of a node from ``first`` on are nowhere any more.

        O(pages). Those whose keys are not known are left out: a node that has left its tree
        cannot compute them.
        """
        if not self._limit:
            return
        reason, pages = self._reason_of[cause], self._pages
        if reason == "not_written_down" and node.users < self._min_users:
            reason = "not_admitted"
        memory = (reason, node.last_user if node.users == 1 else _SEVERAL)
        for start in range(first * KEY_NBYTES, len(node.keys), KEY_NBYTES):
            key = node.keys[start : start + _NBYTES]
            pages.pop(key, None)  # it is the youngest now
            pages[key] = memory
        while len(pages) > self._limit:
            pages.popitem(last=False)

    def why(self, parent: bytes, page: bytes) -> str:
        """Say why a page is nowhere: the key of the page before it, and its tokens."""
        if not self._pages:
            return "never_seen"
        (key,) = chain(parent, page, len(page))
        memory = self._pages.get(key[:_NBYTES])
        return "never_seen" if memory is None else memory[0]

    def num_used(self, keys: bytes, first: int, last: int, user: int) -> int:
        """Return how many pages from ``first`` on, in a row, another than ``user`` has used.

        ``keys`` are page keys, one after the other, of which those before ``last`` count.
        """
        for index in range(first, last):
            start = index * KEY_NBYTES
            memory = self._pages.get(keys[start : start + _NBYTES])
            if memory is None or memory[1] == user:
                return index - first
        return last - first
