"""What a step computes: some tokens of some requests, as one forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hicache.cache import Lease
from hicache.engine.requests import Request
from hicache.engine.runner import Batch, SequenceSlice


class Runner(Protocol):
    """Computes the next tokens of several sequences."""

    def forward(self, batch: Batch) -> Tensor:
        """Return logits of each sequence's last token, ``[sequences, vocabulary]``."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes of one request: its tokens from ``start`` up to ``end``."""

    request: Request
    lease: Lease
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """How many tokens that is."""
        return self.end - self.start

    @property
    def is_wanted(self) -> bool:
        """Whether the request still holds the lease that this was to be computed in."""
        return self.request.lease is self.lease


def batch_of(work: Sequence[Work]) -> Batch:
    """Return one forward over all of it."""
    leases = [item.lease for item in work]

    covered = 0  # layers that what is computed next may read

    def wait(layer: int) -> None:
        nonlocal covered
        if layer >= covered:
            covered = min(lease.wait(layer) for lease in leases)

    slices: list[SequenceSlice] = []
    for item in work:
        token_ids = item.request.token_ids(item.start, item.end)
        slices.append(SequenceSlice(token_ids, item.start, item.lease.slots))
    return Batch(slices, wait)
