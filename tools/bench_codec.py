"""``hicache bench codec``: how much smaller KV gets, and what that costs, on a real model's pages.

The model reads the texts of the demo in each dtype, and the pages that it commits are coded and
decoded: in one thread, as the worker threads of ``PageStore`` do, checksums included, by processor
time; and by way of ``PageStore`` and ``lmdb``, whose files are in the system's cache then, by the
clock. All of it is the best of its rounds.

``pays_below`` is the rate of storage below which reading coded pages takes less time than reading
more bytes, where nothing is decoded while something else is read: what is saved of the bytes,
times the rate of decoding.
"""

import mmap
import os
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from pydantic import SecretStr
from rich.progress import Progress

from hicache.cache import HiCache, Lease
from hicache.codec import PageCodec, open_keyring
from hicache.config import CacheConfig, CodecName, StorageConfig, load
from hicache.engine.engine import Engine
from hicache.errors import StorageError
from hicache.events import Finished, OpId
from hicache.keys import NamespaceDigest, PageRef
from hicache.layout import ITEM_NBYTES, KVLayout
from hicache.plugins import make_backend
from hicache.store import PageStore
from hicache.tools.bench_storage import NAMESPACE, PAGE_SIZE, page_refs
from hicache.tools.demo_script import LINES, SYSTEM
from hicache.tools.report import Figures
from hicache.tools.turns import greedy, take_turn

DTYPES = ("float32", "bfloat16", "float16")
BATCH_PAGES = 32
_POOL_PAGES = 32 * BATCH_PAGES
"""Of L2, of which only the pages in use are ever touched: a 32nd of it is written at a time."""
_BUDGET_NBYTES = 16 << 30
_KEY = SecretStr("5a" * 32)
_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to store pages."""

    codec: CodecName
    level: int = 1
    is_sealed: bool = False
    is_stored: bool = True
    """Whether it is also measured by way of ``PageStore``."""

    @property
    def name(self) -> str:
        """How figures call it."""
        level = "" if self.codec == "none" else str(self.level)
        return f"{self.codec}{level}{'.sealed' if self.is_sealed else ''}"

    @property
    def config(self) -> StorageConfig:
        """The settings of a store that stores so."""
        return StorageConfig(
            codec=self.codec,
            codec_level=self.level,
            key=_KEY if self.is_sealed else None,
            deadline_s=_WAIT_S,
        )


VARIANTS = (
    Variant("none"),
    Variant("zstd"),
    Variant("zstd", 3, is_stored=False),
    Variant("zstd-planes"),
    Variant("zstd-planes", 3, is_stored=False),
    Variant("zstd-planes", 9, is_stored=False),
    Variant("none", is_sealed=True),
    Variant("zstd-planes", is_sealed=True),
)


def run(json_path: Path | None = None, *, is_quick: bool = False, model: str = "smollm2") -> int:
    """Measure, print the figures, and return the exit code."""
    dtypes = DTYPES[:2] if is_quick else DTYPES
    num_rounds = 1 if is_quick else 5
    can_seal = find_spec("cryptography") is not None
    figures = Figures(f"codec: pages of {PAGE_SIZE} tokens of {model}")
    with Progress(transient=True, disable=not os.isatty(2)) as progress:
        task = progress.add_task("codec", total=len(dtypes) * len(VARIANTS))
        for dtype in dtypes:
            pages = pages_of(model, dtype)
            figures.add(f"codec.{dtype}.page", len(pages[0]) / 1024, "KiB")
            for variant in VARIANTS:
                if can_seal or not variant.is_sealed:
                    _measure(figures, dtype, variant, pages, num_rounds)
                progress.advance(task)
    return figures.report(json_path)


def pages_of(model: str, dtype: str) -> list[bytes]:
    """Return the pages that a model commits as it reads the texts of the demo."""
    pages: list[bytes] = []

    class Keeping(HiCache):
        def commit(self, lease: Lease, tokens: bytes) -> None:
            begun = lease.num_committed_pages
            super().commit(lease, tokens)
            for slot in lease.slots[begun : lease.num_committed_pages]:
                page = self.device_pages[slot].contiguous().reshape(-1).view(torch.uint8)
                pages.append(page.numpy().tobytes())

    def open_cache(layout: KVLayout, config: CacheConfig, device: str) -> HiCache:
        return Keeping(layout, config, device=device)

    settings: dict[str, object] = {
        "cache.page_size": PAGE_SIZE,
        "cache.device.size": "2048",
        "cache.host.size": "none",
        "engine.model": model,
        "engine.device": "cpu",
        "engine.dtype": dtype,
    }
    with Engine(load(environ={}, overrides=settings), open_cache=open_cache) as engine:
        text = "\n".join([SYSTEM, *(line.text for line in LINES)])
        take_turn(engine, engine.model.encode(text)[:1024], greedy(1))
    return pages


def _measure(
    figures: Figures, dtype: str, variant: Variant, pages: Sequence[bytes], num_rounds: int
) -> None:
    name = f"codec.{dtype}.{variant.name}"
    coding = _Coding(variant, dtype, pages)
    for _ in range(num_rounds):
        coding.round()
    figures.add(f"{name}.ratio", coding.ratio, "")
    figures.add(f"{name}.encode", *coding.rate("encode"), spread=coding.spread("encode"))
    figures.add(f"{name}.decode", *coding.rate("decode"), spread=coding.spread("decode"))
    if coding.ratio > 1:
        below = (1 - 1 / coding.ratio) * coding.rate("decode")[0]
        figures.add(f"{name}.pays_below", below, "GB/s")
    if variant.is_stored:
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
            stored = _Stored(variant, dtype, pages, folder=Path(folder))
            with stored.opened():
                for _ in range(num_rounds):
                    stored.round()
        for what in ("write", "read"):
            figures.add(f"{name}.{what}", *stored.rate(what), spread=stored.spread(what))


@dataclass(slots=True)
class _Rounds:
    """Times of what was done to pages again and again."""

    variant: Variant
    dtype: str
    pages: Sequence[bytes]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_pages: int = field(init=False)
    """Done in a round."""

    @property
    def page_nbytes(self) -> int:
        return len(self.pages[0])

    def rate(self, name: str) -> tuple[float, str]:
        """Return the rate of the best round, in bytes of pages as they are."""
        return self._rate(min(self.seconds[name])), "GB/s"

    def spread(self, name: str) -> tuple[float, float]:
        """Return the rates of the worst and the best round."""
        return self._rate(max(self.seconds[name])), self._rate(min(self.seconds[name]))

    def _rate(self, seconds: float) -> float:
        return self.num_pages * self.page_nbytes / seconds / 1e9

    def _time(self, name: str, clock: Callable[[], float], what: Callable[[], None]) -> None:
        started = clock()
        what()
        self.seconds.setdefault(name, []).append(clock() - started)


@dataclass(slots=True)
class _Coding(_Rounds):
    """Pages coded and decoded, and nothing else."""

    _codec: PageCodec = field(init=False)
    _refs: list[PageRef] = field(init=False)
    _headers: list[memoryview] = field(init=False)
    _slots: list[memoryview] = field(init=False)
    _stored: list[memoryview] = field(init=False)

    def __post_init__(self) -> None:
        config, codec = self.variant.config, self.variant.codec
        self.num_pages = len(self.pages)
        self._codec = PageCodec(
            PAGE_SIZE, self.page_nbytes,
            codec=codec, level=config.codec_level, item_nbytes=ITEM_NBYTES[self.dtype],
            keyring=open_keyring(config),
        )  # fmt: skip
        self._refs = page_refs(0)[: self.num_pages]
        self._headers = [memoryview(bytearray(self._codec.header_nbytes)) for _ in self.pages]
        self._slots = [memoryview(bytearray(self._codec.slot_nbytes)) for _ in self.pages]

    @property
    def ratio(self) -> float:
        """How many times as long pages are as their records, without headers."""
        return self.num_pages * self.page_nbytes / sum(map(len, self._stored))

    def round(self) -> None:
        """Code every page, and decode it."""
        self._time("encode", time.thread_time, self._encode)
        for slot, stored in zip(self._slots, self._stored, strict=True):
            slot[: len(stored)] = stored
        self._time("decode", time.thread_time, self._decode)

    def _encode(self) -> None:
        self._stored = [
            self._codec.code(header, slot, memoryview(page), ref, NAMESPACE, 0)
            for header, slot, page, ref in zip(
                self._headers, self._slots, self.pages, self._refs, strict=True
            )
        ]

    def _decode(self) -> None:
        target = memoryview(bytearray(self.page_nbytes))
        for header, slot, stored, ref in zip(
            self._headers, self._slots, self._stored, self._refs, strict=True
        ):
            num_read = len(header) + len(stored)
            self._codec.decode(header, slot, target, ref, NAMESPACE, num_read)


@dataclass(slots=True)
class _Stored(_Rounds):
    """Batches of pages written and read by way of ``PageStore`` and ``lmdb``."""

    folder: Path = Path()
    _store: PageStore = field(init=False)
    _num_ops: int = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open a store whose pool holds a batch of pages."""
        self.num_pages, nbytes = BATCH_PAGES, self.page_nbytes
        pool = mmap.mmap(-1, _POOL_PAGES * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = memoryview(pool)
        for slot in range(BATCH_PAGES):
            memory[slot * nbytes : (slot + 1) * nbytes] = self.pages[slot % len(self.pages)]
        made = make_backend("lmdb", {}, path=self.folder / "store", budget_nbytes=_BUDGET_NBYTES)
        self._store = PageStore(
            made, memory, nbytes, self.variant.config,
            page_size=PAGE_SIZE, item_nbytes=ITEM_NBYTES[self.dtype],
        )  # fmt: skip
        self._store.start()
        try:
            yield
        finally:
            self._store.close(_WAIT_S)

    def round(self) -> None:
        """Write a batch of pages, and read it twice: what a target costs once does not count."""
        pages = page_refs(self._num_ops)[:BATCH_PAGES]
        source = array("i", range(BATCH_PAGES))
        target = array("i", range(BATCH_PAGES, 2 * BATCH_PAGES))
        self._time("write", time.perf_counter, lambda: self._do(self._store.store, pages, source))
        self._do(self._store.fetch, pages, target)
        self._time("read", time.perf_counter, lambda: self._do(self._store.fetch, pages, target))

    def _do(
        self,
        what: Callable[[OpId, NamespaceDigest, Sequence[PageRef], "array[int]"], None],
        pages: Sequence[PageRef],
        slots: "array[int]",
    ) -> None:
        """Do it, and wait for its end; all pages must have come to be."""
        self._num_ops += 1
        what(OpId(self._num_ops), NAMESPACE, pages, slots)
        while True:
            if not self._store.wake.wait(_WAIT_S):
                raise StorageError(f"lmdb: no answer in {_WAIT_S:g} s")
            self._store.wake.clear()
            for event in self._store.drain():
                if isinstance(event, Finished):
                    if not all(event.outcomes):
                        raise StorageError("lmdb: pages were lost")
                    return
