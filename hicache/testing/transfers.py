"""A transfer that copies nothing until it is told to, to try every order of completions.

Not imported by ``hicache.testing`` itself, which needs no tensors.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from hicache.actions import Tier
from hicache.events import Finished, OpId
from hicache.transfer.base import Pool, Transfer


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy that was asked for and is not over."""

    op: OpId
    source_tier: Tier
    source: tuple[int, ...]
    target_tier: Tier
    target: tuple[int, ...]


class FakeTransfer(Transfer):
    """Copies that end when a test says so, in any order, and as it says.

    Bytes move when an operation is completed, never before: a source that changes too early, or
    a target that is used too early, shows as wrong bytes.
    """

    num_layer_groups = 1
    is_polled = True

    def __init__(self, device: Pool, host: Pool) -> None:
        self.pending: dict[OpId, PendingCopy] = {}
        """In the order in which they were asked for."""
        self.num_fences = 0
        self.waited: list[tuple[OpId, int]] = []
        """What ``wait`` was called with."""
        self.is_closed = False
        self._pages = {"device": device.pages, "host": host.pages}
        self._finished: list[Finished] = []
        self._num_layers = device.layout.num_layers

    def load(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Remember to copy pages L2 to L1."""
        self._ask(PendingCopy(op, "host", tuple(source), "device", tuple(target)))

    def back_up(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Remember to copy pages L1 to L2."""
        self._ask(PendingCopy(op, "device", tuple(source), "host", tuple(target)))

    def copy_page(self, op: OpId, source_tier: Tier, source: int, target: int) -> None:
        """Remember to copy one page into L1."""
        assert source_tier != "storage"
        self._ask(PendingCopy(op, source_tier, (source,), "device", (target,)))

    def complete(self, op: OpId, outcomes: Sequence[bool] | None = None) -> None:
        """Copy the pages of an operation, or those whose outcome is True, and let it end."""
        copy = self.pending.pop(op)
        ends = [True] * len(copy.source) if outcomes is None else list(outcomes)
        for source, target, is_done in zip(copy.source, copy.target, ends, strict=True):
            if is_done:
                source_page = self._pages[copy.source_tier][source]
                self._pages[copy.target_tier][target].copy_(source_page)
        self._finished.append(Finished(op, ends))

    def fail(self, op: OpId) -> None:
        """Let an operation end with no page copied."""
        self.complete(op, [False] * len(self.pending[op].source))

    def complete_all(self) -> None:
        """Complete what is pending, in the order in which it was asked for."""
        for op in list(self.pending):
            self.complete(op)

    def wait(self, op: OpId, layer: int) -> int:
        """Complete the operation if it is pending: time has passed, as far as the caller sees."""
        self.waited.append((op, layer))
        if op in self.pending:
            self.complete(op)
        return self._num_layers

    def fence(self) -> None:
        """Count."""
        self.num_fences += 1

    def drain(self) -> list[Finished]:
        """Return what was completed or failed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Complete what is pending."""
        self.complete_all()
        self.is_closed = True

    def _ask(self, copy: PendingCopy) -> None:
        assert not self.is_closed, "no copies after close"
        assert copy.op not in self.pending, "an operation has one id"
        self.pending[copy.op] = copy
