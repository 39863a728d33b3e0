"""Puts, as far as the bytes of the day and the shares of tenants have room for them."""

from collections.abc import Sequence

from hicache.keys import PageKey
from hicache.store.batch import Batch
from hicache.store.quotas import Quotas
from hicache.store.records import Records


class Puts:
    """Writes the records of batches to a backend. Belongs to the storage loop."""

    def __init__(self, records: Records, quotas: Quotas, max_batch: int) -> None:
        self._records = records
        self._quotas = quotas
        self._max_batch = max_batch

    async def put(
        self,
        batch: Batch,
        at: Sequence[int],
        items: Sequence[tuple[PageKey, Sequence[memoryview]]],
    ) -> list[bool]:
        """Put the records of the pages at these places; return which were accepted.

        What its tenant has too much of is deleted first. Raises what the backend raises.
        """
        pages = [(batch.pages[index], batch.namespaces[index]) for index in at]
        sizes = [sum(buffer.nbytes for buffer in buffers) for _, buffers in items]
        allowed = self._quotas.take(pages, sizes)
        batch.call.refusal = allowed.refusal
        accepted, victims = [False] * len(items), allowed.victims
        try:
            while victims:
                now, later = victims[: self._max_batch], victims[self._max_batch :]
                await self._records.delete([victim.key for victim in now])
                self._quotas.num_evicted += len(now)
                victims = later
            chosen = [index for index, is_allowed in enumerate(allowed.is_allowed) if is_allowed]
            accepted = allowed.is_allowed  # where put raises, they may be there
            put = await self._records.put([items[index] for index in chosen]) if chosen else []
            flags = dict(zip(chosen, put, strict=True))
            accepted = [flags.get(index, False) for index in range(len(items))]
        finally:
            self._quotas.shares.put_back(victims)
            self._quotas.settle(allowed, accepted)
        return accepted
