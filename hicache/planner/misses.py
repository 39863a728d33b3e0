"""A bounded memory of pages that storage did not have, so that it is not asked again at once."""

from collections import OrderedDict

from hicache.keys import PageKey

_MAX_MISSES = 100_000


class Misses:
    """Keys, each with the time until which it counts as missing."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._expiries: OrderedDict[PageKey, float] = OrderedDict()

    def add(self, key: PageKey, now: float) -> None:
        """Note that storage does not have a page; the oldest notes are dropped when full."""
        self._expiries[key] = now + self._memory_s
        self._expiries.move_to_end(key)
        if len(self._expiries) > _MAX_MISSES:
            self._expiries.popitem(last=False)

    def has(self, key: PageKey, now: float) -> bool:
        """Whether storage has been asked for a page, in vain, a short time ago."""
        return now < self._expiries.get(key, now)

    def clear(self) -> None:
        """Ask again about everything: storage may be another one now."""
        self._expiries.clear()
