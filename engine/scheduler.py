"""Which requests run in the next step, and how many of their tokens.

Pure bookkeeping over two lists: no cache, no clock, no thread. The step asks for orders and
sizes and says what came of them, so equal questions get equal answers.

A step computes at most ``chunk_tokens`` tokens: one of each decoding request first, then prompts
in chunks, then new requests. With ``fixed_chunks`` a step runs one request alone, and prompts are
cut at multiples of ``chunk_tokens``: what is computed has the same shapes whoever else is there.
"""

from bisect import insort
from collections.abc import Callable
from typing import Literal

from hicache.engine.requests import Request
from hicache.keys import TOKEN_NBYTES

Match = Callable[[Request], int]

WINDOW = 64
"""Waiting requests that are looked at in a step: an order over more costs more than it gains."""

MAX_OVERTAKEN = 32
"""A request that so many later ones overtook goes first, however little it hits."""

MATCH_EVERY = 16
"""Steps for which the match of a waiting request is believed."""


class Scheduler:
    """The waiting and the running."""

    def __init__(
        self,
        policy: Literal["fcfs", "lpm"] = "lpm",
        *,
        page_size: int,
        max_batch: int = 32,
        chunk_tokens: int = 512,
        fixed_chunks: bool = False,
    ) -> None:
        self.page_size = page_size
        self.policy = policy
        self.max_batch = max_batch
        self.chunk_tokens = chunk_tokens
        self.fixed_chunks = fixed_chunks
        self.waiting: list[Request] = []
        """By priority, then by arrival."""
        self.running: list[Request] = []
        """In order of admission."""
        self.step = 0

    @property
    def has_room(self) -> bool:
        """Whether one more request may run."""
        return len(self.running) < self.max_batch

    # ------------------------------------------------------------ changes

    def add(self, request: Request) -> None:
        """Queue a request: a new one, or one that was preempted, which keeps its place."""
        insort(self.waiting, request, key=_rank)

    def admit(self, request: Request) -> None:
        """Move a request from the waiting to the running."""
        self.waiting.remove(request)
        self.running.append(request)
        for other in self.waiting:
            if _rank(other) > _rank(request):
                break
            other.num_overtaken += other.priority == request.priority

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is. Harmless for one that is nowhere."""
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)

    # ------------------------------------------------------------ questions

    def running_order(self) -> list[Request]:
        """Return the running requests in the order in which they get tokens of a step."""
        if self.fixed_chunks:
            return sorted(self.running, key=lambda request: request.ran_at)
        decoding = [request for request in self.running if request.is_decoding]
        if len(decoding) > self.chunk_tokens:
            decoding.sort(key=lambda request: request.ran_at)
        return decoding + [request for request in self.running if not request.is_decoding]

    def waiting_order(self, match: Match) -> list[Request]:
        """Return the waiting requests in the order to try them; priority first in both policies.

        O(waiting) only up to ``WINDOW``, and few of those are matched again.
        """
        window = self.waiting[:WINDOW]
        if self.policy == "fcfs":
            return window
        for request in window:
            if request.matched_at < 0 or self.step - request.matched_at >= MATCH_EVERY:
                request.matched, request.matched_at = match(request), self.step
        return sorted(window, key=_longest_match)

    def should_defer(self, request: Request) -> bool:
        """Whether the page that it would compute first is being computed by a running request.

        A moment later it is a hit, so it is matched again in the next step.
        """
        if self.policy == "fcfs":
            return False
        page = self._page_at(request, request.matched)
        is_computed = page is not None and any(
            page == self._page_at(other, other.num_computed)
            for other in self.running
            if not other.is_decoding
        )
        if is_computed:
            request.matched_at = -1
        return is_computed

    def chunk(self, request: Request, budget: int) -> int:
        """Return how many tokens of a request a step with so much budget left computes."""
        if self.fixed_chunks:
            to_the_cut = self.chunk_tokens - request.num_computed % self.chunk_tokens
            return min(request.num_uncomputed, to_the_cut)
        return min(request.num_uncomputed, budget)

    def victim(self) -> Request | None:
        """Return whom to preempt where nobody can go on: the youngest of lowest priority."""
        return max(self.running, key=_rank, default=None)

    def check(self) -> None:
        """Assert what holds between any two calls."""
        assert len(set(map(id, self.waiting + self.running))) == len(self.waiting + self.running)
        assert self.waiting == sorted(self.waiting, key=_rank)
        assert len(self.running) <= self.max_batch

    # ------------------------------------------------------------ helpers

    def _page_at(self, request: Request, num_tokens: int) -> tuple[bytes, int, bytes] | None:
        """Return the whole page that holds a token: namespace, place and tokens."""
        start = num_tokens // self.page_size * self.page_size
        end = start + self.page_size
        if end > request.num_tokens:
            return None
        tokens = bytes(request.tokens[start * TOKEN_NBYTES : end * TOKEN_NBYTES])
        return request.namespace, start, tokens


def _rank(request: Request) -> tuple[int, int]:
    return -request.priority, request.sequence


def _longest_match(request: Request) -> tuple[int, bool, int, int]:
    is_aged = request.num_overtaken >= MAX_OVERTAKEN
    return -request.priority, not is_aged, 0 if is_aged else -request.matched, request.sequence
