"""What may be written to storage: the bytes of a day, and the shares of tenants.

Puts through here count, and so do the records that a scan finds: after a restart the books are
made again from these. Belongs to the storage loop, but for what says otherwise.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import Buffer

from hicache.codec import PageCodec, parse
from hicache.config import StorageConfig
from hicache.errors import CorruptPage
from hicache.keys import NamespaceDigest, PageKey, PageRef
from hicache.namespace import salt_digest
from hicache.sizes import Size
from hicache.store.shares import Limit, Record, Shares
from hicache.store.wear import DAY_S, Wear

log = logging.getLogger(__name__)

_MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Allowance:
    """What of a batch may be put, and what has to be deleted for it."""

    is_allowed: list[bool]
    records: list[Record]
    """One for each of the batch."""
    num_counted: int
    """The first of the batch, which count as written."""
    victims: list[Record]
    refusal: str
    """Why not all of it may be put."""


class Quotas:
    """Both limits of one store, as one process keeps them."""

    def __init__(
        self,
        config: StorageConfig,
        *,
        page_size: int,
        page_nbytes: int,
        clock: Callable[[], float],
    ) -> None:
        def nbytes(text: str) -> int | None:
            return None if text == "none" else Size.parse(text).nbytes(page_size, page_nbytes)

        limits: dict[bytes, Limit] = {}
        for name, tenant in config.tenants.items():
            if (most := nbytes(tenant.max_size)) is not None:
                limits[salt_digest(name)] = Limit(name, most)
        self._clock = clock
        self.num_evicted = 0
        """Records deleted because their tenant had too much."""
        self._started = clock()
        self._said: float | None = None
        self._lock = threading.Lock()
        self.wear = Wear(nbytes(config.max_written_per_day))
        self.shares = Shares(limits, nbytes(config.tenant_max_size))

    @property
    def is_limited(self) -> bool:
        """Whether what a store has already matters for what may be put."""
        return self.shares.is_limited or self.wear.limit_nbytes is not None

    @property
    def tenant_nbytes(self) -> dict[str, int]:
        """Bytes by tenant, where shares are limited. Any thread."""
        return self.shares.nbytes.copy()

    def last_day_nbytes(self) -> int:
        """Return what was written in the last 24 hours."""
        with self._lock:
            return self.wear.last_day_nbytes(self._clock())

    def used(self, keys: Iterable[PageKey]) -> None:
        """Count records as used now."""
        self.shares.used(keys, self._clock())

    def found(self, key: PageKey, header: Buffer, codec: PageCodec) -> None:
        """Take note of a record that a scan has found.

        What is sealed with a key that is not here is in nobody's share: we could not delete it.
        """
        try:
            head = parse(header)
        except CorruptPage:
            return
        now, nbytes = self._clock(), head.header_nbytes + head.stored_nbytes
        written = now - max(0.0, time.time() - head.created_us / _MICRO)
        if written < self._started:  # else it is our own, and counts already
            with self._lock:
                self.wear.found(nbytes, written, now)
        if self.shares.is_limited and (page := codec.key_and_parent(key, header)) is not None:
            self.shares.found(head.namespace, Record(*page, head.number, nbytes, written))

    def take(
        self, batch: Sequence[tuple[PageRef, NamespaceDigest]], sizes: Sequence[int]
    ) -> Allowance:
        """Return what of a batch may be put; ``settle`` must be told what came of it."""
        now = self._clock()
        with self._lock:
            num = self.wear.take(sizes, now)
        records = [
            Record(page.key, page.parent, page.number, nbytes, now)
            for (page, _), nbytes in zip(batch, sizes, strict=True)
        ]
        named = [(namespace, record) for (_, namespace), record in zip(batch, records, strict=True)]
        is_allowed, victims = self.shares.take(named[:num])
        refusal = "share" if False in is_allowed else "refused"
        if num < len(batch):
            refusal = "written_per_day"
            self._say(now)
        is_allowed += [False] * (len(batch) - num)
        return Allowance(is_allowed, records, num, victims, refusal)

    def settle(self, allowance: Allowance, is_accepted: Sequence[bool]) -> None:
        """Take note of which records of the batch were put."""
        unused = 0
        for index, record in enumerate(allowance.records):
            is_put = is_accepted[index]
            if allowance.is_allowed[index]:
                self.shares.written(record, is_put)
            if index < allowance.num_counted and not is_put:
                unused += record.nbytes
        with self._lock:
            self.wear.give_back(unused, self._clock())

    def check(self) -> None:
        """Assert that the books balance. Only while no call is under way may any thread ask."""
        with self._lock:
            self.wear.check()

    def _say(self, now: float) -> None:
        if self._said is None or now - self._said >= DAY_S:
            self._said = now
            log.warning(
                "storage: %.1f GB were written in 24 hours, as much as "
                "cache.storage.max_written_per_day allows: storing less until they have passed",
                self.last_day_nbytes() / 1e9,
            )
