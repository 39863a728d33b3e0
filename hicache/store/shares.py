"""The shares of tenants: who may have how many bytes, and which records go first. Pure.

A backend knows keys only, so the order of the records of limited namespaces is kept here: from the
scan at start, and from what this process puts, reads and touches. Of a namespace that is over its
limit the record that was used longest ago goes first; never one that others of it continue, so
that what is left is always whole from its first page on.

Records that the backend has evicted meanwhile, or has lost, count until their turn comes, which is
about the same: a tenant never gets more than its share, and at worst a little less. Of several
processes each keeps its own books: what the others put is not known before the next start.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache.keys import NamespaceDigest, PageKey

OTHERS = "other"
"""The name under which tenants are added up that the settings do not name."""

_MAX_UNCLAIMED = 1 << 20
"""Records of a scan that are kept at most until somebody says whose namespace they belong to."""


@dataclass(eq=False, slots=True)
class _Share:
    name: str
    limit_nbytes: int
    nbytes: int = 0
    order: "list[tuple[float, int, int, Record]]" = field(default_factory=list)
    """A heap by (stamp, -number); entries that are no longer true stay until they come up."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What one tenant may have."""

    name: str
    nbytes: int


@dataclass(eq=False, slots=True)
class Record:
    """One page's record in a limited namespace."""

    key: PageKey
    parent: bytes
    number: int
    nbytes: int
    stamp: float
    is_written: bool = False
    share: _Share | None = None


class Shares:
    """All limited namespaces. Belongs to the storage loop, but for ``nbytes``."""

    def __init__(
        self,
        limits: Mapping[bytes, Limit],
        default_nbytes: int | None,
        *,
        max_unclaimed: int = _MAX_UNCLAIMED,
    ) -> None:
        """``limits``: by the digest of a salt; ``default_nbytes`` is of each other salt."""
        self._max_unclaimed = max_unclaimed
        self.nbytes: dict[str, int] = dict.fromkeys([limit.name for limit in limits.values()], 0)
        """Bytes by tenant, those without a limit of their own together. Its keys never change."""
        self._limits = limits
        self._default = None if default_nbytes is None else Limit(OTHERS, default_nbytes)
        if self._default is not None:
            self.nbytes[OTHERS] = 0
        self._shares: dict[NamespaceDigest, _Share | None] = {}
        """None: not limited."""
        self._records: dict[PageKey, Record] = {}
        self._children: Counter[bytes] = Counter()
        """Records by the key of the page before them."""
        self._unclaimed: dict[NamespaceDigest, list[Record]] = {}
        self._num_unclaimed = 0
        self._num_entries = 0

    @property
    def is_limited(self) -> bool:
        """Whether any namespace has a limit."""
        return bool(self.nbytes)

    def describe(self, namespace: NamespaceDigest, salt: bytes | None) -> None:
        """Take note of whose namespace this is."""
        if namespace in self._shares or not self.is_limited:
            return
        limit = None if salt is None else self._limits.get(salt, self._default)
        share = None if limit is None else _Share(limit.name, limit.nbytes)
        self._shares[namespace] = share
        records = self._unclaimed.pop(namespace, [])
        if share is not None:
            for record in records:
                if record.key not in self._records:
                    self._enter(record, share)

    def found(self, namespace: NamespaceDigest, record: Record) -> None:
        """Take note of a record that a scan has found."""
        if not self.is_limited or record.key in self._records:
            return
        record.is_written = True
        if namespace not in self._shares:
            self._num_unclaimed += 1
            if self._num_unclaimed <= self._max_unclaimed:
                self._unclaimed.setdefault(namespace, []).append(record)
        elif (share := self._shares[namespace]) is not None:
            self._enter(record, share)

    def take(
        self, records: Sequence[tuple[NamespaceDigest, Record]]
    ) -> tuple[list[bool], list[Record]]:
        """Make room for records that are to be put; return which may be, and what must go.

        The victims are out of the books: ``put_back`` those that could not be deleted. Of each
        put, ``written`` must be told.
        """
        entered: list[Record] = []
        for namespace, record in records:
            share = self._shares.get(namespace)
            if share is not None:
                self.gone([record.key])
                self._enter(record, share)
                entered.append(record)
        victims: list[Record] = []
        for share in {id(r.share): r.share for r in entered}.values():
            assert share is not None
            victims += self._make_room(share)
        for record in reversed(entered):
            if record.share is not None and record.share.nbytes > record.share.limit_nbytes:
                self._remove(record)
        return [
            record.share is not None or self._shares.get(namespace) is None
            for namespace, record in records
        ], victims

    def put_back(self, victims: Iterable[Record]) -> None:
        """Take note that these records are still there."""
        for record in victims:
            if record.key not in self._records and record.share is not None:
                self._enter(record, record.share)

    def written(self, record: Record, is_accepted: bool) -> None:
        """Take note of what became of a record that ``take`` let through."""
        if self._records.get(record.key) is not record:
            return
        if is_accepted:
            record.is_written = True
            self._push(record)
        else:
            self._remove(record)

    def used(self, keys: Iterable[PageKey], now: float) -> None:
        """Count records as used now."""
        for key in keys if self._records else ():
            if (record := self._records.get(key)) is not None:
                record.stamp = now
                self._push(record)

    def gone(self, keys: Iterable[PageKey]) -> None:
        """Forget records that are not there any more."""
        for key in keys if self._records else ():
            if (record := self._records.get(key)) is not None:
                self._remove(record)

    def check(self) -> None:
        """Assert that the books balance, and that every record that may go has its turn."""
        sums: Counter[str] = Counter()
        children = Counter(record.parent for record in self._records.values())
        assert children == +self._children
        for key, record in self._records.items():
            assert record.key == key
            assert record.share is not None
            sums[record.share.name] += record.nbytes
            may_go = record.is_written and not children[key]
            assert not may_go or any(self._is_due(entry) and entry[3] is record
                                     for entry in record.share.order)  # fmt: skip
        assert sums == +Counter(self.nbytes)
        for share in self._shares.values():
            assert share is None or share.nbytes >= 0

    # ------------------------------------------------------------ helpers

    def _enter(self, record: Record, share: _Share) -> None:
        record.share = share
        self._records[record.key] = record
        self._children[record.parent] += 1
        share.nbytes += record.nbytes
        self.nbytes[share.name] += record.nbytes
        if record.is_written:
            self._push(record)

    def _remove(self, record: Record) -> None:
        share = record.share
        assert share is not None
        del self._records[record.key]
        share.nbytes -= record.nbytes
        self.nbytes[share.name] -= record.nbytes
        self._children[record.parent] -= 1
        if not self._children[record.parent]:
            del self._children[record.parent]
            if (parent := self._records.get(PageKey(record.parent))) is not None:
                self._push(parent)
        if not record.is_written:
            record.share = None

    def _push(self, record: Record) -> None:
        """Give a record its turn, if it may go."""
        share = record.share
        assert share is not None
        if not record.is_written or self._children[record.key]:
            return
        self._num_entries += 1
        heapq.heappush(share.order, (record.stamp, -record.number, self._num_entries, record))
        if len(share.order) > 64 + 4 * len(self._records):
            share.order = [entry for entry in share.order if self._is_due(entry)]
            heapq.heapify(share.order)

    def _is_due(self, entry: tuple[float, int, int, Record]) -> bool:
        stamp, _, _, record = entry
        is_there = self._records.get(record.key) is record
        return is_there and stamp == record.stamp and not self._children[record.key]

    def _make_room(self, share: _Share) -> list[Record]:
        victims: list[Record] = []
        while share.nbytes > share.limit_nbytes and share.order:
            entry = heapq.heappop(share.order)
            if self._is_due(entry):
                self._remove(entry[3])
                victims.append(entry[3])
        return victims
