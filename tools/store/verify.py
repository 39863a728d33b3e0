"""``hicache store verify``: every record read and proved; with ``--repair`` the bad ones go."""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape

from hicache.codec import KIND_SEALED, Header, Keyring, peek
from hicache.errors import CorruptPage, InputError
from hicache.keys import NamespaceDigest
from hicache.storage import StorageBackend, StoredRecord
from hicache.tools.store import naming, reading, showing
from hicache.tools.store.naming import Named
from hicache.tools.store.reading import Found, Reader
from hicache.tools.store.showing import private
from hicache.tools.store.survey import NEWER, OLDER, what_is

_HEAD_NBYTES = 152
_MOST_SHOWN = 20
_MOST_KEPT = 10_000
"""Bad records that are remembered one by one; beyond it they are only counted."""


@dataclass(slots=True)
class Bad:
    """A record that is not what it should be."""

    key: str
    namespace: str | None
    page: int | None
    problem: str


@dataclass(slots=True)
class Verdict:
    """What a pass over a store has found."""

    num_good: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    num_gone: int = 0
    num_bad: int = 0
    num_dropped: int = 0
    """Records that the backend itself found damaged or gone when it was opened, and dropped."""
    num_lost: int = 0
    """Of those that went meanwhile, how many the backend could not read: what it evicts just then,
    mostly, since what is damaged is listed as such, and not read."""
    num_removed: int = 0
    num_sealed: int = 0
    """Good as far as that can be seen without their key."""
    others: Counter[str] = field(default_factory=Counter)
    bad: list[Bad] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.num_bad and not self.num_dropped


class Verifier:
    """One pass over a store."""

    def __init__(
        self,
        backend: StorageBackend,
        keyring: Keyring | None,
        aside: Path | None,
        *,
        repairs: bool,
    ) -> None:
        self.verdict = Verdict()
        self._backend = backend
        self._keyring = keyring
        self._aside = aside
        self._repairs = repairs
        self._names: dict[NamespaceDigest, Named] = {}

    async def run(self) -> Verdict:
        """Read every record and prove it. Removes bad ones if it is to repair."""
        verdict, started = self.verdict, time.monotonic()
        stats = await self._backend.stats()
        verdict.num_dropped = stats.num_lost
        with showing.progress("verifying", stats.num_records) as bar:
            records = self._backend.records(_HEAD_NBYTES)
            async for batch in Reader(self._backend, self._keyring).read(records):
                await self._judge(batch)
                bar.add(len(batch))
        verdict.seconds = time.monotonic() - started
        lost = (await self._backend.stats()).num_lost - verdict.num_dropped
        verdict.num_lost = min(lost, verdict.num_gone)
        return verdict

    async def _judge(self, batch: list[Found]) -> None:
        verdict = self.verdict
        fresh = {one.header.namespace for one in batch if one.header} - self._names.keys()
        if fresh:
            self._names |= await naming.name(self._backend, list(fresh))
        bad: list[Found] = []
        for one in batch:
            verdict.nbytes += one.nbytes
            if one.header is not None:
                one.problem = _misfit(one.header, self._names[one.header.namespace])
            if one.problem is not None and (what := what_is(one.record)) in (OLDER, NEWER):
                verdict.others[what] += 1
            elif one.problem is not None:
                bad.append(one)
            elif one.header is None:
                verdict.num_gone += 1
            else:
                verdict.num_good += 1
                verdict.num_sealed += one.header.kind == KIND_SEALED and not one.is_opened
        verdict.num_bad += len(bad)
        verdict.bad += [_bad(one) for one in bad[: _MOST_KEPT - len(verdict.bad)]]
        if bad and self._repairs:
            await self._remove(bad)

    async def _remove(self, bad: list[Found]) -> None:
        if self._aside is not None:
            for one in bad:
                if one.data is not None:
                    _keep(self._aside / f"{one.record.key.hex()}.record", one.data)
        await reading.delete(self._backend, [one.record.key for one in bad])
        self.verdict.num_removed += len(bad)


async def run(
    backend: StorageBackend,
    keyring: Keyring | None,
    *,
    repairs: bool,
    aside: Path | None,
    is_json: bool,
) -> int:
    """Verify a store and show what was found; 1 if something was bad."""
    verdict = await Verifier(backend, keyring, aside, repairs=repairs).run()
    if is_json:
        showing.show_json(_as_json(verdict))
    else:
        _show(verdict, repairs=repairs, aside=aside)
    return 0 if verdict.is_clean else 1


def _show(verdict: Verdict, *, repairs: bool, aside: Path | None) -> None:
    speed = verdict.nbytes / verdict.seconds / 1e9
    read = showing.count(verdict.num_good + verdict.num_bad, "record")
    showing.show(
        f"{read}, {showing.size(verdict.nbytes)} read and proved in {verdict.seconds:.1f} s: "
        f"{speed:.2f} GB/s"
    )
    if verdict.bad:
        table = showing.table("key", "namespace", ">page", "problem")
        for one in verdict.bad[:_MOST_SHOWN]:
            page = "-" if one.page is None else f"{one.page:,}"
            table.add_row(one.key[:16], one.namespace or "-", page, escape(one.problem))
        showing.show(table)
        if verdict.num_bad > _MOST_SHOWN:
            showing.show(f"... and {verdict.num_bad - _MOST_SHOWN:,} more (--json lists them)\n")
    for line in _lines(verdict, repairs=repairs, aside=aside):
        showing.show(line)


def _lines(verdict: Verdict, *, repairs: bool, aside: Path | None) -> list[str]:
    lines: list[str] = []
    if verdict.num_dropped:
        lines.append(
            f"{showing.count(verdict.num_dropped, 'record')} lost: damaged or cut off on disk, "
            "dropped by the store itself"
        )
    if verdict.num_gone:
        gone = f"{showing.count(verdict.num_gone, 'record')} evicted or removed meanwhile"
        lost = f", {verdict.num_lost:,} of them as they were read" if verdict.num_lost else ""
        lines.append(gone + lost)
    if verdict.num_sealed:
        lines.append(
            f"{showing.count(verdict.num_sealed, 'record')} sealed with a key that is not in the "
            "settings: checksums hold, seals were not opened"
        )
    for what, number in sorted(verdict.others.items()):
        hint = ": hicache store gc removes them" if what == OLDER else ""
        lines.append(f"{showing.count(number, 'record')} of {what}{hint}")
    if verdict.num_removed:
        kept = f", what could be read of them is in {aside}" if aside is not None else ""
        lines.append(f"{showing.count(verdict.num_removed, 'bad record')} removed{kept}")
    elif verdict.num_bad:
        lines.append(f"{showing.count(verdict.num_bad, 'bad record')}: --repair removes them")
    if verdict.is_clean:
        lines.append("nothing is wrong")
    return lines


def _as_json(verdict: Verdict) -> dict[str, object]:
    return {
        "good": verdict.num_good,
        "bad": verdict.num_bad,
        "dropped": verdict.num_dropped,
        "gone": verdict.num_gone,
        "lost": verdict.num_lost,
        "removed": verdict.num_removed,
        "unopened": verdict.num_sealed,
        "others": dict(verdict.others),
        "nbytes": verdict.nbytes,
        "seconds": verdict.seconds,
        "gb_per_s": verdict.nbytes / verdict.seconds / 1e9,
        "records": [
            {"key": one.key, "namespace": one.namespace, "page": one.page, "problem": one.problem}
            for one in verdict.bad
        ],
    }


def _misfit(header: Header, named: Named) -> str | None:
    """Return why a page cannot be one of its namespace; ``None`` where it can."""
    if not header.is_page or named.namespace is None:
        return None
    layout = named.namespace.layout
    if header.raw_nbytes != layout.page_nbytes:
        return f"length: a page of {header.raw_nbytes} bytes in a layout of {layout.page_nbytes}"
    if header.num_tokens != layout.page_size:
        return f"tokens: {header.num_tokens} of them in a layout of {layout.page_size}"
    return None


def _bad(found: Found) -> Bad:
    """Return what is told of a bad record: namespace and page as far as its header says."""
    header = _claimed(found.record)
    namespace = None if header is None else header.namespace.hex()[: naming.SHORT]
    page = header.number if header is not None and header.is_page else None
    return Bad(found.record.key.hex(), namespace, page, found.problem or "")


def _claimed(record: StoredRecord) -> Header | None:
    try:
        return None if record.head is None else peek(record.head)
    except CorruptPage:
        return None


def _keep(path: Path, data: memoryview) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "wb", opener=private) as file:
            file.write(data)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
