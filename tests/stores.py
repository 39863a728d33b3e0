"""A PageStore over a backend that a test can break, with a clock that a test holds."""

import os
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, TypeVar

from hicache.backends.memory import MemoryBackend
from hicache.config import StorageConfig
from hicache.events import ChainFound, Event, Finished, OpId, Probed, Returned
from hicache.keys import TOKEN_NBYTES, NamespaceDigest, PageKey, PageRef, chain, pack
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.storage import StorageBackend
from hicache.store import PageStore
from hicache.testing.faulty import FaultyBackend

PAGE_SIZE = 4
PAGE_NBYTES = 256
NAMESPACE = NamespaceDigest(sha256(b"a namespace").digest())
OTHER_NAMESPACE = NamespaceDigest(sha256(b"another").digest())
WAIT_S = 20.0
"""How long a test waits for what must come. Nothing is measured by it."""


def namespace(**changes: object) -> Namespace:
    """Return a namespace that differs in some fields from others made so."""
    layout = KVLayout(1, 1, 8, "bfloat16", PAGE_SIZE)
    base = Namespace(model_config="{}", weights=b"weights", layout=layout)
    return replace(base, **changes)  # type: ignore[arg-type]


_Event = TypeVar("_Event", bound=Event)


class FakeClock:
    """Time stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def page_refs(
    num_pages: int, *, first_token: int = 0, namespace: NamespaceDigest = NAMESPACE
) -> list[PageRef]:
    """Return the pages of one sequence."""
    tokens = pack(range(first_token, first_token + num_pages * PAGE_SIZE))
    return refs_of(tokens, namespace)


def refs_of(tokens: bytes, namespace: NamespaceDigest = NAMESPACE) -> list[PageRef]:
    """Return the pages of packed tokens."""
    nbytes = PAGE_SIZE * TOKEN_NBYTES
    keys = chain(namespace, tokens, nbytes)
    parents = [namespace, *keys]
    return [
        PageRef(key, parent, number, tokens[number * nbytes : (number + 1) * nbytes])
        for number, (key, parent) in enumerate(zip(keys, parents, strict=False))
    ]


def content(key: bytes) -> bytes:
    """Return the bytes that the page of this key has, in this test world."""
    return random.Random(key).randbytes(PAGE_NBYTES)


def repetitive(key: bytes) -> bytes:
    """Return other contents, of which a quarter of the bytes are alike, as exponents are."""
    page = bytearray(content(key))
    page[3::4] = b"\x3c" * (PAGE_NBYTES // 4)
    return bytes(page)


def slots(*numbers: int) -> "array[int]":
    return array("i", numbers)


@dataclass(slots=True)
class World:
    """A started store, its backend and its pool."""

    num_pages: int = 256
    config: dict[str, Any] = field(default_factory=dict)
    inner: StorageBackend = field(default_factory=MemoryBackend)
    backend: FaultyBackend = field(init=False)
    clock: FakeClock = field(default_factory=FakeClock)
    content: Callable[[bytes], bytes] = content
    """What the page of a key contains."""
    item_nbytes: int = 1
    memory: bytearray = field(init=False)
    store: PageStore = field(init=False)
    events: list[Event] = field(default_factory=list)
    """All that was drained and not yet asked for."""
    last_op: int = 0

    def __post_init__(self) -> None:
        self.backend = FaultyBackend(self.inner)
        self.memory = bytearray(os.urandom(self.num_pages * PAGE_NBYTES))
        self.store = self.new_store()

    def new_store(self) -> PageStore:
        """Return a store that is not started, on the same backend and pool."""
        return PageStore(
            self.backend,
            memoryview(self.memory),
            PAGE_NBYTES,
            StorageConfig(**self.config),
            page_size=PAGE_SIZE,
            item_nbytes=self.item_nbytes,
            clock=self.clock,
        )

    def __enter__(self) -> "World":
        self.store.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.heal()
        assert self.store.close(WAIT_S)

    # ------------------------------------------------------------ doing

    def new_op(self) -> OpId:
        self.last_op += 1
        return OpId(self.last_op)

    def fill(self, pages: Sequence[PageRef], source: Sequence[int]) -> None:
        """Put into the pool what these pages contain."""
        for page, slot in zip(pages, source, strict=True):
            self.memory[slot * PAGE_NBYTES : (slot + 1) * PAGE_NBYTES] = self.content(page.key)

    def start_store(self, pages: Sequence[PageRef], first: int = 0) -> OpId:
        """Ask for a store from slots ``first`` on, filled with what the pages contain."""
        op, source = self.new_op(), slots(*range(first, first + len(pages)))
        self.fill(pages, source)
        self.store.store(op, NAMESPACE, pages, source)
        return op

    def start_fetch(self, pages: Sequence[PageRef], first: int = 128) -> OpId:
        op = self.new_op()
        self.store.fetch(op, NAMESPACE, pages, slots(*range(first, first + len(pages))))
        return op

    def start_probe(self, keys: Sequence[PageKey]) -> OpId:
        op = self.new_op()
        self.store.probe(op, NAMESPACE, keys)
        return op

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.store.pump()

    # ------------------------------------------------------------ seeing

    def store_pages(self, pages: Sequence[PageRef], first: int = 0) -> list[bool]:
        return list(self.finished(self.start_store(pages, first)).outcomes)

    def fetch_pages(self, pages: Sequence[PageRef], first: int = 128) -> list[bool]:
        return list(self.finished(self.start_fetch(pages, first)).outcomes)

    def probe_keys(self, keys: Sequence[PageKey]) -> list[bool]:
        op = self.start_probe(keys)
        return list(self.wait_for(Probed, op).found)

    def finished(self, op: OpId) -> Finished:
        return self.wait_for(Finished, op)

    def returned(self, op: OpId) -> Returned:
        return self.wait_for(Returned, op)

    def chains(self, num: int) -> list[ChainFound]:
        return [self.wait_for(ChainFound) for _ in range(num)]

    def wait_for(self, kind: type[_Event], op: OpId | None = None) -> _Event:
        """Return the next event of a kind, and take it out of ``events``."""
        while True:
            for event in self.drain():
                if isinstance(event, kind) and (op is None or getattr(event, "op", None) == op):
                    self.events.remove(event)
                    return event
            assert self.store.wake.wait(WAIT_S), f"no {kind.__name__} of {op}: {self.events}"
            self.store.wake.clear()

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait for something that the loop does, and that no event tells."""
        end = time.monotonic() + WAIT_S
        while not is_true():
            assert time.monotonic() < end, "it does not come true"
            self.store.pump()
            time.sleep(0)

    def page(self, slot: int) -> bytes:
        return bytes(self.memory[slot * PAGE_NBYTES : (slot + 1) * PAGE_NBYTES])

    def drain(self) -> list[Event]:
        self.events += self.store.drain()
        return self.events

    def reads_and_writes(self) -> None:
        """Assert that the store works."""
        pages = page_refs(3, first_token=50_000)
        assert self.store_pages(pages, first=40) == [True] * 3
        assert self.fetch_pages(pages, first=120) == [True] * 3
        self.store.delete([page.key for page in pages])
        self.store.check()
