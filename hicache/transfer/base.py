"""What moves pages between L1 and L2 promises, whatever the device.

Called from the step thread only. The pools are permanent: no copy outlives the memory that it
reads or writes, as long as ``close`` comes before the pools are dropped. Who asks for a copy
holds both ends until its ``Finished`` was drained: until then nobody else may write the source,
nor read or write the target.
"""

from abc import ABC, abstractmethod
from array import array
from typing import Protocol

from torch import Tensor

from hicache.actions import Tier
from hicache.events import Finished, OpId
from hicache.layout import KVLayout


class Pool(Protocol):
    """What a copy reads and writes."""

    @property
    def layout(self) -> KVLayout:
        """The form of its pages."""
        ...

    @property
    def pages(self) -> Tensor:
        """``[N, *page_shape]``, contiguous."""
        ...


class Wake(Protocol):
    """Something that sleeps until it is set, such as ``threading.Event``."""

    def set(self) -> None:
        """Wake it."""
        ...


class Transfer(ABC):
    """Copies pages between L1 and L2 beside the computation.

    Slots are read when an operation is asked for: the arrays may change afterwards. Every
    operation ends as one ``Finished``, with one outcome a page.
    """

    num_layer_groups: int
    """In how many parts, by layer, a load arrives."""
    is_polled: bool
    """Whether completions are found by calling ``drain`` only; else ``wake`` is set."""

    @abstractmethod
    def load(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Copy pages L2 to L1, layer group by layer group, before any back-up that waits."""

    @abstractmethod
    def back_up(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Copy pages L1 to L2, behind all that has been computed so far."""

    @abstractmethod
    def copy_page(self, op: OpId, source_tier: Tier, source: int, target: int) -> None:
        """Copy one whole page of L1 or L2 into L1, behind the load that brings it if one does."""

    @abstractmethod
    def wait(self, op: OpId, layer: int) -> int:
        """Let what is computed next see this layer of a load; return the first that it may not see.

        CPU: blocks. CUDA: the current stream waits, the thread does not. Returns at once for an
        operation that is unknown or over. A load that failed raises nothing: its outcome tells.
        """

    @abstractmethod
    def fence(self) -> None:
        """Let copies asked for from now on start after all that the current stream was given.

        To be called after a forward was launched, in the stream that it was launched in.
        """

    @abstractmethod
    def drain(self) -> list[Finished]:
        """Return what is over since the last call, in the order in which it ended."""

    @abstractmethod
    def close(self) -> None:
        """Wait for every copy that was asked for, and stop. Calling it twice is harmless."""
