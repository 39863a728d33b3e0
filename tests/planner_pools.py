"""Pools of markers and a set for storage: what the copies that a planner wants would do.

Every slot holds the key of the page that was written to it. A copy reads its source when it
starts and when it ends, and both must be the same; it scribbles over its target from the first
moment on. So a slot that is used again under a copy shows.
"""

from hicache.actions import BackUp, CopyPage, Fetch, Load, Probe, Store
from hicache.events import Event, Finished, OpId, Probed

SCRIBBLE = b"scribble"
PARTIAL = b"partial"

Copy = Load | BackUp | CopyPage | Fetch | Store | Probe


class Pools:
    """L1, L2 and L3, and who writes where."""

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self.device: list[bytes] = [b""] * device_pages
        self.host: list[bytes] = [b""] * host_pages
        self.storage: set[bytes] = set()
        self._sources: dict[OpId, list[bytes]] = {}

    def begin(self, action: Copy) -> None:
        """Start to copy."""
        source = self.source(action)
        assert SCRIBBLE not in source, f"reads what is being written: {action}"
        if isinstance(action, Store):
            assert source == [page.key for page in action.pages], "stores other pages"
        self._sources[action.op] = source
        for pool, slot in self._targets(action):
            pool[slot] = SCRIBBLE

    def end(self, action: Copy, outcomes: list[bool]) -> Event:
        """Finish a copy as far as outcomes and storage allow; return what to tell of it."""
        if isinstance(action, Probe):
            there = [key in self.storage for key in action.keys]
            return Probed(action.op, [a and b for a, b in zip(outcomes, there, strict=True)])
        content = self.give_back(action)
        if isinstance(action, Fetch):
            content = [page.key for page in action.pages]
            outcomes = [a and key in self.storage for a, key in zip(outcomes, content, strict=True)]
        elif isinstance(action, Store):
            self.storage.update(key for key, good in zip(content, outcomes, strict=True) if good)
        elif isinstance(action, CopyPage):
            content = [PARTIAL]
        targets = self._targets(action)
        for (pool, slot), page, good in zip(targets, content, outcomes, strict=bool(targets)):
            pool[slot] = page if good else SCRIBBLE
        return Finished(action.op, outcomes)

    def give_back(self, action: Copy) -> list[bytes]:
        """Return what a copy has read; its pages were its own until now."""
        source = self.source(action)
        assert source == self._sources.pop(action.op), "a source changed under its copy"
        return source

    def scribble(self, action: Fetch) -> None:
        """Write anything to the pages of a fetch."""
        for slot in action.target:
            self.host[slot] = SCRIBBLE

    def source(self, action: Copy) -> list[bytes]:
        """Return what is now in the slots that a copy reads."""
        match action:
            case Load() | Store():
                return [self.host[slot] for slot in action.source]
            case BackUp():
                return [self.device[slot] for slot in action.source]
            case CopyPage():
                pool = self.device if action.source_tier == "device" else self.host
                return [pool[action.source]]
            case _:
                return []

    def _targets(self, action: Copy) -> list[tuple[list[bytes], int]]:
        match action:
            case Load():
                return [(self.device, slot) for slot in action.target]
            case CopyPage():
                return [(self.device, action.target)]
            case BackUp() | Fetch():
                return [(self.host, slot) for slot in action.target]
            case _:
                return []


def num_outcomes(action: Copy) -> int:
    """Return how many outcomes an operation has."""
    match action:
        case Load() | BackUp():
            return len(action.target)
        case Fetch() | Store():
            return len(action.pages)
        case Probe():
            return len(action.keys)
        case _:
            return 1
