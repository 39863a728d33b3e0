"""What is in a store, by its headers: one pass, and memory only for each namespace."""

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from hicache.codec import FIXED_NBYTES, FORMAT_VERSION, KIND_SEALED, MAGIC, Header, peek
from hicache.errors import CorruptPage, InputError
from hicache.keys import NamespaceDigest
from hicache.storage import StorageBackend, StoredRecord
from hicache.tools.store import naming
from hicache.tools.store.naming import Named
from hicache.tools.store.reading import expected_nbytes

_AGAIN_S = 60.0
"""A use so long after a page was written is another than its being written: stamps are minutes."""

OLDER, NEWER, FOREIGN, UNREADABLE = "older format", "newer format", "foreign", "unreadable"


@dataclass(slots=True)
class Share:
    """What one namespace has."""

    num_pages: int = 0
    nbytes: int = 0
    num_first: int = 0
    """Pages that begin a prompt."""
    longest_pages: int = 0
    first_created: float | None = None
    last_created: float | None = None
    last_used: float | None = None
    num_reused: int = 0
    """Pages used at least once after they were written."""
    num_sealed: int = 0
    has_uses: bool = False
    """Whether the backend knows when a record was used."""

    def add(self, record: StoredRecord, header: Header) -> None:
        """Take a page in."""
        created = header.created_us / 1e6
        self.num_pages += 1
        self.nbytes += expected_nbytes(record)
        self.num_sealed += header.kind == KIND_SEALED
        self.num_first += header.number == 0
        self.longest_pages = max(self.longest_pages, header.number + 1)
        self.first_created = min(created, self.first_created or created)
        self.last_created = max(created, self.last_created or created)
        if record.used is not None:
            self.has_uses = True
            used = max(record.used, created)  # stamps are whole minutes
            self.last_used = max(used, self.last_used or used)
            self.num_reused += record.used - created >= _AGAIN_S


@dataclass(slots=True)
class Survey:
    """What a store has."""

    shares: dict[NamespaceDigest, Share] = field(default_factory=dict)
    names: dict[NamespaceDigest, Named] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)
    """Records that are no pages of this format, by what they are."""
    num_records: int = 0

    def select(self, text: str) -> Named:
        """Return the namespace whose digest begins so."""
        return naming.select(self.names.values(), text)

    def only(self) -> Named:
        """Return the one namespace that there is. Raises ``InputError`` where there are others."""
        with_pages = [self.names[digest] for digest, share in self.shares.items() if share.nbytes]
        if not with_pages:
            raise InputError("there are no pages in this store")
        if len(with_pages) > 1:
            names = ", ".join(sorted(one.short for one in with_pages))
            raise InputError(f"there are several namespaces, say which: --namespace {names}")
        return with_pages[0]


async def survey(backend: StorageBackend) -> Survey:
    """Return what the store has. O(records), a header each."""
    found = Survey()
    async for record, header in headed(backend, found.others):
        found.num_records += 1
        if header is None:
            continue
        share = found.shares.setdefault(header.namespace, Share())
        if header.is_page:
            share.add(record, header)
    found.names = await naming.name(backend, list(found.shares))
    return found


async def headed(
    backend: StorageBackend, others: Counter[str], head_nbytes: int = FIXED_NBYTES
) -> AsyncIterator[tuple[StoredRecord, Header | None]]:
    """Yield every record with its header; without one if it has none of ours, which is counted."""
    async for record in backend.records(head_nbytes):
        header = None
        try:
            header = None if record.head is None else peek(record.head)
        except CorruptPage:
            header = None
        if header is not None and header.key != record.key:
            header = None
        if header is None:
            others[what_is(record)] += 1
        yield record, header


def what_is(record: StoredRecord) -> str:
    """Return what a record is that is none of this format."""
    if record.head is None:
        return UNREADABLE
    if not record.head.startswith(MAGIC):
        return FOREIGN
    version = int.from_bytes(record.head[4:6], "little")
    if version == FORMAT_VERSION:
        return UNREADABLE
    return OLDER if version < FORMAT_VERSION else NEWER
