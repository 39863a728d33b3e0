"""A request inside the engine: its tokens, how far they are computed, and what it holds.

One kind of work only: tokens ``num_computed`` up to some end are computed, and where the end is
the last token, the next one is sampled. Prefill, decoding, and computing again after a
preemption are the same.
"""

from array import array
from dataclasses import dataclass

from hicache.actions import HitTokens
from hicache.cache import Lease
from hicache.engine.generation import Generation
from hicache.engine.sampling import Sampler
from hicache.engine.stopping import Answer
from hicache.events import RequestId
from hicache.keys import TOKEN_NBYTES, NamespaceDigest

NO_LIMIT = 2**62
NO_NAMESPACE = NamespaceDigest(b"")

NO_HIT = HitTokens()

PROMPT_TAIL = 16
"""Last tokens of a prompt among which a template may have begun the reasoning itself."""


@dataclass(eq=False, slots=True)
class Request:
    """One request, from arrival to its last output."""

    id: RequestId
    """What the cache calls it; 0 is none yet. A preempted request comes back under a new one."""
    sequence: int
    """Order of arrival; never changes."""
    tokens: bytearray
    """Prompt and output so far, packed. Only ever grows."""
    num_prompt_tokens: int
    generation: Generation
    sampler: Sampler
    answer: Answer
    """Both keep their state when the request is preempted."""
    salt: str | None = None
    """Whose namespace it uses."""
    namespace: NamespaceDigest = NO_NAMESPACE
    """Set when it enters the engine."""
    priority: int = 0
    first_id: RequestId | None = None
    """What the cache called it first, once it has been preempted."""
    num_computed: int = 0
    """Leading tokens whose KV is in the slots of the lease."""
    lease: Lease | None = None
    commit_limit: int = NO_LIMIT
    """Tokens from here on are never shared."""
    reasoning_ids: tuple[int, ...] = ()
    """The tokens that begin what the chat template drops from history; empty: nothing."""
    hit: HitTokens = NO_HIT
    """What it need not compute, by its first grant."""
    has_hit: bool = False
    """Whether that was reported, which happens once."""
    has_failed: bool = False
    """Whether a step of its failed and was tried again; once, and no more."""
    packed: bytes = b""
    """All its tokens while it waits, as the cache wants them."""

    # The scheduler's own notes.
    matched: int = 0
    """Tokens it would hit, when last asked."""
    matched_at: int = -1
    """Step at which that was asked; -1 is never."""
    num_overtaken: int = 0
    """Later arrivals that were admitted before it."""
    ran_at: int = -1
    """Step in which it last ran."""

    def __post_init__(self) -> None:
        for end in range(max(1, self.num_prompt_tokens - PROMPT_TAIL), self.num_prompt_tokens + 1):
            self._limit_by_reasoning(end)

    @property
    def num_tokens(self) -> int:
        """Of prompt and output so far."""
        return len(self.tokens) // TOKEN_NBYTES

    @property
    def num_output_tokens(self) -> int:
        """Sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens between it and its next one; never 0."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether one more token is all that is missing."""
        return self.num_uncomputed == 1 and self.num_output_tokens > 0

    def token_ids(self, start: int, end: int) -> "array[int]":
        """Return some of its tokens."""
        ids = array("i")
        ids.frombytes(self.tokens[start * TOKEN_NBYTES : end * TOKEN_NBYTES])
        return ids

    def lose_hits(self, num_tokens: int) -> None:
        """Count at most so many tokens as hit: those of the slowest tiers go first."""
        device = min(self.hit.device, num_tokens)
        host = min(self.hit.host, num_tokens - device)
        storage = min(self.hit.storage, num_tokens - device - host)
        self.hit = HitTokens(device, host, storage)

    def append(self, token_id: int) -> None:
        """Add a sampled token. O(1)."""
        self.tokens += token_id.to_bytes(TOKEN_NBYTES, "little", signed=True)
        self._limit_by_reasoning(self.num_tokens)

    def uncommitted(self, page_size: int) -> bytes:
        """Return the whole computed pages that may be shared and are not yet, packed."""
        assert self.lease is not None
        end = min(self.num_computed, self.commit_limit) // page_size
        page_nbytes = page_size * TOKEN_NBYTES
        return bytes(self.tokens[self.lease.num_committed_pages * page_nbytes : end * page_nbytes])

    def _limit_by_reasoning(self, end: int) -> None:
        """Share nothing from where reasoning begins, if the tokens up to ``end`` begin it.

        The next turn's prompt will lack it, and so differ from there on.
        """
        start = end - len(self.reasoning_ids)
        if not self.reasoning_ids or not 0 <= start < self.commit_limit:
            return
        if tuple(self.token_ids(start, end)) == self.reasoning_ids:
            self.commit_limit = start
