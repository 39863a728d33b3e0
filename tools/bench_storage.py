"""``hicache bench storage``: a backend against memcpy and plain files of the same bytes.

Pages go through ``PageStore``, so reads are verified, tokens and checksum, and writes have their
checksums computed. What is compared takes turns in the same run, and each figure is the best of
its rounds: other work on the machine can only make a round slower.
"""

import mmap
import os
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import product
from pathlib import Path

from rich.progress import Progress

from hicache.config import StorageConfig
from hicache.errors import StorageError
from hicache.events import Finished, OpId, Probed
from hicache.keys import TOKEN_NBYTES, NamespaceDigest, PageRef, chain, pack
from hicache.plugins import make_backend
from hicache.store import PageStore
from hicache.tools.report import Figures

KIB = 1024
NUM_PAGES = 128
"""A batch, as far as it fits into ``_BATCH_NBYTES``."""
_BATCH_NBYTES = 256 * KIB * KIB
_BUDGET_NBYTES = 16 << 30
"""As of a store in use, far more than is written: a small one would be cut into small segments."""
_POOL_BATCHES = 32
"""Of L2, of which only the pages in use are ever touched. ``PageStore`` lends a 32nd of it to
writes at a time: from this size on a batch goes down in one call; in a smaller L2, in several."""
PAGE_SIZE = 64
SIZES_KIB = (64, 360, 2048, 8192)
BACKENDS = ("lmdb", "file")
"""Those that we keep files with. The bars are for the first."""
BARS: dict[str, tuple[str, dict[int, float]]] = {
    "write": ("plain_write", {360: 0.60, 2048: 0.60}),
    "read_warm": ("memcpy", {360: 0.45, 2048: 0.60}),
    "read_busy": ("memcpy_busy", {}),
    "read_cold": ("plain_cold", {360: 0.85, 2048: 0.85}),
    "loop_warm": ("memcpy", {}),
    "loop_cold": ("plain_cold", {}),
}
"""What each is compared with, and by KiB a page what the default backend must reach of it."""
NAMESPACE = NamespaceDigest(sha256(b"hicache bench storage").digest())
_PLAIN_NBYTES = 512 * KIB
"""A plain write: larger ones are slower on some kernels, and would make ours look good."""
_WAIT_S = 120.0


def run(
    json_path: Path | None = None,
    *,
    is_quick: bool = False,
    backends: Sequence[str] = BACKENDS,
    folder: Path | None = None,
) -> int:
    """Measure backends in new directories below ``folder``; print figures; return the exit code.

    The directories are removed afterwards.
    """
    title = f"storage: {', '.join(backends)}; batches of {NUM_PAGES} pages, 256 MiB at most"
    figures = Figures(title)
    sizes = SIZES_KIB[:2] if is_quick else SIZES_KIB
    num_rounds = {kib: 3 if is_quick or kib > 2048 else 8 for kib in sizes}
    with Progress(transient=True, disable=not os.isatty(2)) as progress:
        task = progress.add_task("storage", total=len(backends) * sum(num_rounds.values()))
        for backend, kib in product(backends, sizes):
            with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=folder) as made:
                bench = _Bench(backend, Path(made), kib * KIB)
                with bench.opened():
                    for _ in range(num_rounds[kib]):
                        bench.round()
                        progress.advance(task)
                    bench.cold_round()
                bench.report(figures, backend, kib)
    return figures.report(json_path)


@dataclass(slots=True)
class _Bench:
    """One backend at one page size, and what it is compared with."""

    backend: str
    folder: Path
    page_nbytes: int
    rounds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each round."""
    _store: PageStore = field(init=False)
    _memory: memoryview = field(init=False)
    _num_ops: int = 0

    @property
    def num_pages(self) -> int:
        """Of a batch."""
        return min(NUM_PAGES, _BATCH_NBYTES // self.page_nbytes)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the backend, with a pool whose pages in use have all been touched."""
        nbytes = 2 * self.num_pages * self.page_nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pool = mmap.mmap(-1, _POOL_BATCHES * self.num_pages * self.page_nbytes, flags=flags)
        pool.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(pool)
        for start in range(0, nbytes, self.page_nbytes):
            self._memory[start : start + self.page_nbytes] = os.urandom(KIB) * (
                self.page_nbytes // KIB
            )
        made = make_backend(
            self.backend, {}, path=self.folder / "store", budget_nbytes=_BUDGET_NBYTES
        )
        config = StorageConfig(backend=self.backend, deadline_s=_WAIT_S)
        self._store = PageStore(made, self._memory, self.page_nbytes, config, page_size=PAGE_SIZE)
        self._store.start()
        try:
            yield
        finally:
            self._store.close(_WAIT_S)

    def round(self) -> None:
        """Do everything once."""
        number = len(self.rounds.get("write", []))
        pages = page_refs(number)[: self.num_pages]
        plain = self.folder / f"plain-{number}"
        _write_down(self.folder)
        self._time("plain_write", lambda: self._write_plain(plain))
        _write_down(self.folder)
        self._time("write", lambda: self._write(pages))
        self._time("memcpy", self._copy)
        self._time("read_warm", lambda: self._read(pages))
        self._time("memcpy", self._copy)
        self._time("read_warm", lambda: self._read(pages))
        self._time("contains", lambda: self._probe(pages))
        if number == 0:
            self._write_files()
        self._time("loop_warm", self._read_files)
        with _busy_thread():
            self._time("read_busy", lambda: self._read(pages))
            self._time("memcpy_busy", self._copy)

    def cold_round(self) -> None:
        """Read once more, with nothing in the system's cache; then a plain file, likewise."""
        pages = page_refs(0)[: self.num_pages]
        for _ in range(2):
            _write_down(self.folder, is_forgotten=True)
            self._time("read_cold", lambda: self._read(pages))
            _write_down(self.folder, is_forgotten=True)
            self._time("plain_cold", lambda: self._read_plain(self.folder / "plain-0"))
            self._time("loop_cold", self._read_files)

    def report(self, figures: Figures, backend: str, kib: int) -> None:
        """Add what was measured; bars are for the default backend."""
        prefix, mb = f"storage.{backend}.{kib}", self.num_pages * self.page_nbytes / 1e6
        contains_us = [seconds / self.num_pages * 1e6 for seconds in self.rounds.pop("contains")]
        rates = {name: [mb / each for each in rounds] for name, rounds in self.rounds.items()}
        for name, values in rates.items():
            best, spread = max(values), (min(values), max(values))
            if name not in BARS:
                figures.add(f"{prefix}.{name}", best, "MB/s", spread=spread)
                continue
            base, bars = BARS[name]
            limit = max(rates[base])
            at_least = bars[kib] * limit if backend == "lmdb" and kib in bars else None
            figures.add(f"{prefix}.{name}", best, "MB/s", at_least=at_least, spread=spread)
            figures.add(f"{prefix}.{name}.of_{base}", best / limit, "")
        spread = min(contains_us), max(contains_us)
        figures.add(f"{prefix}.contains", spread[0], "us a key", spread=spread)

    def _time(self, name: str, what: Callable[[], None]) -> None:
        started = time.perf_counter()
        what()
        self.rounds.setdefault(name, []).append(time.perf_counter() - started)

    def _copy(self) -> None:
        memory, nbytes = self._memory, self.page_nbytes
        half = self.num_pages * nbytes
        for start in range(0, half, nbytes):
            memory[half + start : half + start + nbytes] = memory[start : start + nbytes]

    def _write_plain(self, path: Path) -> None:
        total = self.num_pages * self.page_nbytes
        with open(path, "xb", buffering=0) as file:
            for start in range(0, total, _PLAIN_NBYTES):
                file.write(self._memory[start : min(start + _PLAIN_NBYTES, total)])

    def _read_plain(self, path: Path) -> None:
        half = self.num_pages * self.page_nbytes
        with open(path, "rb", buffering=0) as file:
            count = os.preadv(file.fileno(), [self._memory[half:]], 0)
        assert count == half

    def _file(self, number: int) -> Path:
        return self.folder / f"page-{number}"

    def _write_files(self) -> None:
        nbytes = self.page_nbytes
        for number in range(self.num_pages):
            self._file(number).write_bytes(self._memory[number * nbytes : (number + 1) * nbytes])

    def _read_files(self) -> None:
        """Read pages as simple backends do: one file a page, one after the other, unproved."""
        half, nbytes = self.num_pages * self.page_nbytes, self.page_nbytes
        for number in range(self.num_pages):
            start = half + number * nbytes
            with open(self._file(number), "rb", buffering=0) as file:
                assert file.readinto(self._memory[start : start + nbytes]) == nbytes

    def _write(self, pages: list[PageRef]) -> None:
        self._store.store(self._op(), NAMESPACE, pages, array("i", range(self.num_pages)))
        self._finish()

    def _read(self, pages: list[PageRef]) -> None:
        target = array("i", range(self.num_pages, 2 * self.num_pages))
        self._store.fetch(self._op(), NAMESPACE, pages, target)
        self._finish()

    def _probe(self, pages: list[PageRef]) -> None:
        self._store.probe(self._op(), NAMESPACE, [page.key for page in pages])
        self._finish()

    def _op(self) -> OpId:
        self._num_ops += 1
        return OpId(self._num_ops)

    def _finish(self) -> None:
        """Wait for the operation that was begun last; all its pages must have come to be."""
        while True:
            if not self._store.wake.wait(_WAIT_S):
                raise StorageError(f"{self.backend}: no answer in {_WAIT_S:g} s")
            self._store.wake.clear()
            for event in self._store.drain():
                if isinstance(event, Finished) and event.op == self._num_ops:
                    if not all(event.outcomes):
                        raise StorageError(f"{self.backend}: pages were lost")
                    return
                if isinstance(event, Probed) and event.op == self._num_ops:
                    return


def page_refs(number: int) -> list[PageRef]:
    """Return the pages of one sequence, another for each number."""
    tokens = pack(range(number << 16, (number << 16) + NUM_PAGES * PAGE_SIZE))
    nbytes = PAGE_SIZE * TOKEN_NBYTES
    keys = chain(NAMESPACE, tokens, nbytes)
    return [
        PageRef(key, parent, at, tokens[at * nbytes : (at + 1) * nbytes])
        for at, (key, parent) in enumerate(zip(keys, [NAMESPACE, *keys], strict=False))
    ]


def _write_down(folder: Path, is_forgotten: bool = False) -> None:
    """Have the system write to disk what it holds of these files, so that no write waits for an
    earlier one's; and forget it, for reads that are cold."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            if is_forgotten:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@contextmanager
def _busy_thread() -> Iterator[None]:
    """Have a thread beside that does nothing but Python."""
    stop = threading.Event()

    def spin() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    thread = threading.Thread(target=spin, name="hicache-bench-busy")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
