"""The pages of one fetch or store, and what comes of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.keys import NamespaceDigest, PageKey, PageRef
from hicache.store.operations import Call


@dataclass(eq=False, slots=True)
class Batch:
    """One entry a page in every list, but ``headers``, which may be longer."""

    call: Call
    views: Sequence[memoryview]
    """The pages in the pool."""
    headers: Sequence[memoryview]
    """A buffer for each record's header."""
    keys: list[PageKey] = field(init=False)
    pages: list[PageRef] = field(init=False)
    namespaces: list[NamespaceDigest] = field(init=False)
    lengths: list[int | None] = field(init=False)
    """How long the records were that were read; ``None`` where there was none."""
    good: list[bool] = field(init=False)
    """Whether it was read and proved, or stored."""

    def __post_init__(self) -> None:
        parts = self.call.parts
        self.pages = [
            page for part in parts for page in part.operation.pages[part.start : part.stop]
        ]
        self.keys = [page.key for page in self.pages]
        self.namespaces = [
            part.operation.namespace for part in parts for _ in range(part.start, part.stop)
        ]
        self.lengths = [None] * len(self.pages)
        self.good = [False] * len(self.pages)
