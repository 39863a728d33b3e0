"""A bounded memory of pages that are nowhere any more, so that a miss can be explained."""

from collections import OrderedDict
from typing import Literal

from hicache.keys import KEY_NBYTES, chain
from hicache.planner.config import PlannerConfig
from hicache.tree import Node

Cause = Literal["device", "host", "storage", "forgotten"]
"""The tier that had a page last, or the operator who wanted it gone."""

_NBYTES = 12
"""Of a page key, kept to know the page again."""


class Ghosts:
    """Why pages left, by key; the oldest are forgotten first."""

    def __init__(self, config: PlannerConfig) -> None:
        self._limit = config.num_ghosts
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        self._reason_of: dict[Cause, str] = {
            "device": "not_written_down" if config.host_pages else "evicted_from_device",
            "host": "not_written_down" if config.has_storage else "evicted_from_host",
            "storage": "evicted_from_storage",
            "forgotten": "forgotten",
        }

    def remember(self, node: Node, first: int, cause: Cause) -> None:
        """Note that the pages of a node from ``first`` on are nowhere any more.

        O(pages). Those whose keys are not known are left out: a node that has left its tree
        cannot compute them.
        """
        if not self._limit:
            return
        reason, reasons = self._reason_of[cause], self._reasons
        for start in range(first * KEY_NBYTES, len(node.keys), KEY_NBYTES):
            key = node.keys[start : start + _NBYTES]
            reasons.pop(key, None)  # it is the youngest now
            reasons[key] = reason
        while len(reasons) > self._limit:
            reasons.popitem(last=False)

    def why(self, parent: bytes, page: bytes) -> str:
        """Say why a page is nowhere: the key of the page before it, and its tokens."""
        if not self._reasons:
            return "never_seen"
        (key,) = chain(parent, page, len(page))
        return self._reasons.get(key[:_NBYTES], "never_seen")
