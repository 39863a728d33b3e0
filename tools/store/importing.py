"""``hicache store import``: a file of ``export`` into a store; every record proved before."""

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hicache.codec import (
    FORMAT_VERSION,
    KIND_PAGE,
    KIND_SEALED,
    MAGIC,
    Header,
    header_nbytes,
    prove,
)
from hicache.codec.record import SEALED_FIXED_NBYTES
from hicache.errors import CorruptPage, InputError
from hicache.keys import NamespaceDigest
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.storage import StorageBackend
from hicache.tools.store import naming, showing
from hicache.tools.store.bundle import Framed, Source
from hicache.tools.store.opening import Place, opened
from hicache.tools.store.reading import BATCH_NBYTES, BATCH_RECORDS, IN_FLIGHT

STORED, PRESENT, REFUSED = "stored", "there already", "refused by the store"
DAMAGED, FOREIGN = "damaged", "foreign"
_WRONG = (REFUSED, DAMAGED, FOREIGN)


@dataclass(frozen=True, slots=True)
class Described:
    """What the first record of a file says that all others are."""

    frame: Framed
    namespace: Namespace
    digest: NamespaceDigest


async def run(place: Place, path: Path | None, *, may_make: bool, is_json: bool) -> int:
    """Store what a file, or stdin, holds; 1 if not all of it is good and was taken."""
    with ExitStack() as stack:
        source = Source(_stream(path, stack))
        frames = iter(source)
        described = _described(next(frames, None))
        budget = place.budget_nbytes(described.namespace.layout)
        async with opened(place, budget_nbytes=budget, may_make=may_make) as backend:
            importer = Importer(backend, described)
            total = None if path is None else path.stat().st_size
            with showing.progress("importing", total, is_bytes=True) as bar:
                await importer.run(source, frames, bar)
            stats = await backend.stats()
    counts = importer.counts
    counts[DAMAGED] += source.end.num_skipped
    is_whole = source.end.num_expected is not None
    told = {key: number for key, number in sorted(counts.items()) if number}
    if is_json:
        evicted = {"evicted": stats.num_evicted, "is_whole": is_whole}
        showing.show_json({"namespace": described.digest.hex()} | told | evicted)
    else:
        parts = ", ".join(f"{number:,} {what}" for what, number in told.items()) or "no pages"
        showing.show(f"namespace {described.digest.hex()[: naming.SHORT]}: {parts}")
    if not is_whole:
        showing.say("the file ends early: it is not all that was exported")
    if stats.num_evicted:
        showing.say(
            f"the store is at its budget of {showing.size(budget)} (cache.storage.size): "
            f"{showing.count(stats.num_evicted, 'record')} evicted for what was imported"
        )
    return 1 if not is_whole or any(counts[what] for what in _WRONG) else 0


class Importer:
    """Puts the records of one file into one store."""

    def __init__(self, backend: StorageBackend, described: Described) -> None:
        self.counts: Counter[str] = Counter()
        self._backend = backend
        self._described = described
        self._layout: KVLayout = described.namespace.layout
        page_size = self._layout.page_size
        self._head_nbytes = {
            KIND_PAGE: header_nbytes(page_size, backend.alignment),
            KIND_SEALED: header_nbytes(page_size, backend.alignment, SEALED_FIXED_NBYTES),
        }

    async def run(self, source: Source, frames: Iterator[Framed], bar: showing.Bar) -> None:
        """Put what is good and not there yet, a few batches at once."""
        putting: deque[asyncio.Task[None]] = deque()
        step = min(BATCH_RECORDS, self._backend.max_batch)
        await self._put([self._described.frame])
        self.counts.clear()
        try:
            while batch := await asyncio.to_thread(self._batch, frames, step):
                putting.append(asyncio.create_task(self._put(batch)))
                if len(putting) >= IN_FLIGHT:
                    await putting.popleft()
                bar.move(source.nbytes)
            while putting:
                await putting.popleft()
        finally:
            for task in putting:
                task.cancel()
            await asyncio.gather(*putting, return_exceptions=True)

    def _batch(self, frames: Iterator[Framed], max_records: int) -> list[Framed]:
        """Return the next good records; nothing at the end. Counts the others."""
        batch: list[Framed] = []
        nbytes = 0
        for framed in frames:
            problem = self._problem(framed)
            if problem is not None:
                self.counts[problem] += 1
                continue
            batch.append(framed)
            nbytes += len(framed.data or b"")
            if len(batch) == max_records or nbytes >= BATCH_NBYTES:
                break
        return batch

    def _problem(self, framed: Framed) -> str | None:
        if framed.data is None:
            return DAMAGED
        try:
            header = prove(framed.key, memoryview(framed.data))
        except CorruptPage:
            is_ours = framed.data[:6] == MAGIC + FORMAT_VERSION.to_bytes(2, "little")
            return DAMAGED if is_ours else FOREIGN
        return None if self._fits(header) else FOREIGN

    def _fits(self, header: Header) -> bool:
        """Whether it is a page of this namespace, in the form that this store's readers expect."""
        return (
            header.is_page
            and header.namespace == self._described.digest
            and header.raw_nbytes == self._layout.page_nbytes
            and header.num_tokens == self._layout.page_size
            and header.header_nbytes == self._head_nbytes[header.kind]
        )

    async def _put(self, batch: list[Framed]) -> None:
        present = await self._backend.contains([framed.key for framed in batch])
        missing = [one for one, is_there in zip(batch, present, strict=True) if not is_there]
        self.counts[PRESENT] += len(batch) - len(missing)
        if missing:
            accepted = await self._backend.put([(one.key, [one.data or b""]) for one in missing])
            self.counts[STORED] += sum(accepted)
            self.counts[REFUSED] += len(accepted) - sum(accepted)


def _described(framed: Framed | None) -> Described:
    """Return what the first record describes. Raises ``InputError`` where it is no description."""
    if framed is None or framed.data is None:
        raise InputError("the file's first record, which describes its namespace, is damaged")
    digest = NamespaceDigest(framed.key)
    namespace = naming.described(digest, framed.data)
    if namespace is None:
        raise InputError("the file's first record describes no namespace that this HiCache knows")
    return Described(framed, namespace, digest)


def _stream(path: Path | None, stack: ExitStack) -> BinaryIO:
    if path is None:
        if sys.stdin.isatty():
            raise InputError("stdin is a terminal: name a file, or pipe one in")
        return sys.stdin.buffer
    try:
        return stack.enter_context(path.open("rb"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
