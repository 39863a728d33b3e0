"""The storage contract: what a backend must do, and nothing about how.

A backend maps keys to opaque immutable records. Headers, checksums, codecs, deadlines, retries
and the circuit breaker are the business of ``PageStore``, above.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict
from typing_extensions import Buffer

from hicache.keys import PageKey

CONTRACT_VERSION = 1


@dataclass(frozen=True, slots=True)
class StorageStats:
    """What a backend holds."""

    num_records: int
    nbytes: int
    """Bytes that the records occupy, on disk where there is one."""
    budget_nbytes: int | None = None
    """The bytes that it may occupy; ``None`` where nothing bounds it."""
    num_evicted: int = 0
    """Records that it has evicted since it was opened."""
    num_lost: int = 0
    """Records that it found damaged or gone when it was opened, or when they were read since."""
    num_stuck: int = 0
    """Times that what was to be evicted could not be deleted, since it was opened."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as its backend knows it without having read all of it."""

    key: PageKey
    head: bytes | None
    """Its first bytes; ``None`` where it is there by name, but is known to be unreadable."""
    nbytes: int | None = None
    """Its length; ``None`` where the backend would have to read it to know."""
    used: float | None = None
    """When it was put or last used, in seconds since 1970, to the minute; ``None``: not known."""


class BackendOptions(BaseModel):
    """What ``[storage.options]`` may say; a backend with options of its own subclasses it.

    The docstring under a field is its help text.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


class StorageBackend(ABC):
    """A map from ``PageKey`` to an immutable record that outlives the process.

    A key is only ever put with the same bytes, so writes need no ordering and lost races are
    harmless. All calls come from one event loop, many at a time; a blocking library belongs in
    a thread, one hop a batch. Raise ``StorageError`` for failures; absence is ``None``.

    Batches are the primitive because every store we know charges per round trip.
    """

    contract_version: ClassVar[int] = CONTRACT_VERSION
    is_shared: ClassVar[bool] = False
    """Whether other machines read and write the same records."""
    outlives_process: ClassVar[bool] = True
    """Whether records are there when the store is opened anew, by this process or another."""
    evicts_itself: ClassVar[bool] = False
    """Whether it keeps to the budget that ``create`` gave it. Else nothing does.

    The simple way: add up bytes in ``put`` and ``delete``, and evict there; ``stats`` only reads
    the sum, and does not walk the records.
    """
    max_batch: ClassVar[int] = 128
    """Keys a call, at most."""
    alignment: ClassVar[int] = 1
    """What the address and the length of every buffer is a multiple of."""
    options_type: ClassVar[type[BackendOptions]] = BackendOptions
    """The model of its options."""

    @classmethod
    def create(
        cls, options: BackendOptions, *, path: Path | None, budget_nbytes: int | None
    ) -> Self:
        """Return a backend that is not open yet; touches no file.

        ``options`` is an instance of ``options_type`` (say so with an ``assert isinstance``).
        ``path`` is the store's directory, for backends that need one (it may not exist yet);
        ``budget_nbytes`` bounds the bytes of all its records, for those that evict themselves.
        Raises ``ConfigError``. A backend that needs none of these need not override it.
        """
        return cls()

    def is_there(self) -> bool:
        """Whether there is a store to open: else ``open`` would make one, or fail.

        Asked before ``open``, by tools that only look. Touches nothing. By default True, as for
        a server elsewhere.
        """
        return True

    async def open(self, pool: Sequence[memoryview]) -> None:
        """Prepare for calls. ``pool`` is the host memory, for backends that register it.

        Raises ``StorageError`` or ``ConfigError``, in one line for a person.
        """

    async def close(self) -> None:
        """Finish what was accepted and let go of everything. Calling it twice is harmless."""

    async def __aenter__(self) -> Self:
        await self.open([])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @abstractmethod
    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        """Read each record into its buffers; return its length, ``None`` where absent.

        The record is scattered over its buffers in order. A record longer than its buffers
        fills them and returns its true length. A cancelled or timed-out call may leave anything
        in ``into``, but must not touch it after it has returned.
        """

    @abstractmethod
    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        """Store records, each the concatenation of its buffers; return which were accepted.

        Each is afterwards whole or absent, to every reader, also after a crash. A key that is
        present already counts as accepted and may be left alone.
        """

    @abstractmethod
    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return which keys are present."""

    @abstractmethod
    async def delete(self, keys: Sequence[PageKey]) -> None:
        """Remove records. An absent key is no error."""

    @abstractmethod
    async def touch(self, keys: Sequence[PageKey]) -> None:
        """Count these records as used now, for eviction. An absent key is no error."""

    @abstractmethod
    def scan(self, header_nbytes: int) -> AsyncIterator[tuple[PageKey, bytes]]:
        """Yield every record's key and its first ``header_nbytes`` bytes, in any order.

        Records put or removed meanwhile may or may not appear.
        """

    async def records(self, head_nbytes: int) -> AsyncIterator[StoredRecord]:
        """Yield every record with its first ``head_nbytes`` bytes, and what is known of it.

        What ``scan`` leaves out because it is damaged is here, without a head, so that tools can
        say so. Reading changes nothing. By default what ``scan`` yields.
        """
        async for key, head in self.scan(head_nbytes):
            yield StoredRecord(key, head)

    @abstractmethod
    async def stats(self) -> StorageStats:
        """Return what is held now."""
