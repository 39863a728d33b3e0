"""``hicache store gc`` and ``rm``: what would go, and then, if it is confirmed, what has gone."""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hicache.codec import KIND_NAMESPACE, Keyring
from hicache.errors import InputError
from hicache.keys import NamespaceDigest, PageKey
from hicache.storage import StorageBackend
from hicache.tools.store import finding, reading, showing
from hicache.tools.store.forest import ORPHAN, Forest, Rows
from hicache.tools.store.naming import Named
from hicache.tools.store.reading import expected_nbytes
from hicache.tools.store.survey import OLDER, headed, what_is
from hicache.tools.store.texts import Prefix

_MOST_PASSES = 3
"""Over a namespace that is being removed while a server may be writing to it."""
UNREACHABLE, EMPTY = "unreachable", "empty"


@dataclass(slots=True)
class Group:
    """Records that are to go for one reason."""

    name: str
    why: str
    num_records: int = 0
    nbytes: int = 0
    keys: list[PageKey] = field(default_factory=list)
    """Of those that are not removed as they are found."""

    def count(self, nbytes: int) -> None:
        """Take a record in."""
        self.num_records += 1
        self.nbytes += nbytes

    def add(self, key: PageKey, nbytes: int) -> None:
        """Take a record in, and remember it."""
        self.count(nbytes)
        self.keys.append(key)


# ---------------------------------------------------------------- gc


async def collect(
    backend: StorageBackend, *, unused_s: float, is_meant: bool, is_json: bool
) -> int:
    """Show what nothing can use any more, and remove it if that is meant.

    Pages used within ``unused_s`` are left: a server may be about to write what they lack.
    """
    before = time.time() - unused_s
    older = Group("older", "records of an older format")
    orphans = Group(UNREACHABLE, "pages whose ancestors are gone")
    empty = Group(EMPTY, "descriptions of namespaces without pages")
    descriptions: dict[NamespaceDigest, tuple[int, float]] = {}
    async for record, header in headed(backend, Counter()):
        if header is None and what_is(record) == OLDER:
            older.add(record.key, record.nbytes or 0)
        elif header is not None and header.kind == KIND_NAMESPACE:
            used = max(record.used or 0.0, header.created_us / 1e6)
            descriptions[header.namespace] = expected_nbytes(record), used
    forest = await Forest.read(backend, Counter())
    for row in (await _still_orphans(backend, forest)).tolist():
        if forest.used[row] < before:
            orphans.add(forest.key(row), int(forest.nbytes[row]))
    for digest, (nbytes, used) in descriptions.items():
        if digest not in forest.namespaces and used < before:
            empty.add(PageKey(digest), nbytes)
    groups = [group for group in (older, orphans, empty) if group.keys]
    if is_meant:
        for group in groups:
            await reading.delete(backend, group.keys[::-1])
    _report(groups, is_meant=is_meant, is_json=is_json)
    return 0


async def _still_orphans(backend: StorageBackend, forest: Forest) -> Rows:
    """Return the pages that nothing leads to; those whose parent has come meanwhile are not."""
    tops = (forest.parent == ORPHAN).nonzero()[0].tolist()
    parents = [forest.parent_key(row) for row in tops]
    is_there = await _contains(backend, parents)
    return forest.below(row for row, there in zip(tops, is_there, strict=True) if not there)


async def _contains(backend: StorageBackend, keys: Sequence[PageKey]) -> list[bool]:
    step = backend.max_batch
    found: list[bool] = []
    for start in range(0, len(keys), step):
        found += await backend.contains(keys[start : start + step])
    return found


# ---------------------------------------------------------------- rm


async def remove_namespaces(
    backend: StorageBackend, names: Sequence[Named], *, is_meant: bool, is_json: bool
) -> int:
    """Remove all pages of namespaces. Their descriptions stay, for servers that go on.

    Where a server writes meanwhile, what it has written since is looked for again.
    """
    groups = {one.digest: Group(one.short, f"pages of {one.model}") for one in names}
    for number in range(_MOST_PASSES if is_meant else 1):
        if not await _remove_pass(backend, groups, is_meant=is_meant) and number:
            break
    _report(list(groups.values()), is_meant=is_meant, is_json=is_json)
    return 0


async def _remove_pass(
    backend: StorageBackend, groups: dict[NamespaceDigest, Group], *, is_meant: bool
) -> int:
    """Go through the store once; return how many pages were found."""
    num_found = 0
    batch: list[PageKey] = []
    async for record, header in headed(backend, Counter()):
        if header is None or header.kind == KIND_NAMESPACE or header.namespace not in groups:
            continue
        groups[header.namespace].count(expected_nbytes(record))
        num_found += 1
        batch.append(record.key)
        if len(batch) == min(reading.BATCH_RECORDS, backend.max_batch):
            if is_meant:
                await backend.delete(batch)
            batch = []
    if is_meant and batch:
        await backend.delete(batch)
    return num_found


async def remove_prefix(
    backend: StorageBackend,
    names: Collection[Named],
    prefix: Prefix,
    keyring: Keyring | None,
    *,
    is_meant: bool,
    is_json: bool,
) -> int:
    """Remove every page whose sequence, up to its end, begins with the prefix.

    Pages before that are also those of other prompts, and stay. Raises ``InputError`` where
    nothing begins so.
    """
    forest = await Forest.read(backend, Counter(), [one.digest for one in names])
    rows = forest.below(await finding.tops(backend, forest, prefix, keyring)).tolist()
    if not rows:
        raise InputError("nothing in this store begins with that prefix")
    groups = {one.digest: Group(one.short, f"pages of {one.model}") for one in names}
    for row in rows:
        digest = forest.namespaces[forest.namespace[row]]
        groups[digest].add(forest.key(row), int(forest.nbytes[row]))
    found = [group for group in groups.values() if group.keys]
    if is_meant:
        for group in found:
            await reading.delete(backend, group.keys[::-1])  # the ends of prompts first
    _report(found, is_meant=is_meant, is_json=is_json)
    return 0


def _report(groups: Sequence[Group], *, is_meant: bool, is_json: bool) -> None:
    if is_json:
        told = [
            {"what": one.name, "records": one.num_records, "nbytes": one.nbytes} for one in groups
        ]
        showing.show_json({"removed": is_meant, "groups": told})
        return
    if not groups:
        showing.show("nothing to remove")
        return
    table = showing.table("what", ">records", ">size", "")
    for one in groups:
        table.add_row(one.name, f"{one.num_records:,}", showing.size(one.nbytes), one.why)
    num, nbytes = sum(one.num_records for one in groups), sum(one.nbytes for one in groups)
    total = f"{showing.count(num, 'record')}, {showing.size(nbytes)}"
    showing.show(table, f"{total} removed" if is_meant else f"{total} would go: --yes removes them")
