"""What a trace holds, and how much of it an infinite cache would save."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache.tools.traces.normal import TraceInfo, TraceRequest


@dataclass(slots=True)
class Summary:
    """Counts over the requests of a trace, as they pass by.

    A byte for each block id and a name for each session, whatever the length of the trace.
    """

    block_size: int
    num_requests: int = 0
    num_continuing: int = 0
    """Requests that say which one they continue."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    longest_input_tokens: int = 0
    num_block_references: int = 0
    num_blocks: int = 0
    """Different ones: the pages that an infinite cache ends with."""
    num_new_tokens: int = 0
    """Tokens of the different blocks: the edges of the tree of all inputs."""
    first_s: float | None = None
    last_s: float | None = None
    is_in_order: bool = True
    """Whether no request comes before the one above it in the file."""
    sessions: set[str] = field(default_factory=set)
    tenants: set[str] = field(default_factory=set)
    _seen: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(1 << 16, np.bool_))

    def passing(self, requests: Iterable[TraceRequest]) -> Iterable[TraceRequest]:
        """Give the requests on, each counted before."""
        for request in requests:
            self.add(request)
            yield request

    def add(self, request: TraceRequest) -> None:
        """Count a request."""
        self.num_requests += 1
        self.num_continuing += request.parent is not None
        self.num_input_tokens += request.num_input_tokens
        self.num_output_tokens += request.num_output_tokens
        self.longest_input_tokens = max(self.longest_input_tokens, request.num_input_tokens)
        self.sessions.add(request.session)
        self.tenants.add(request.tenant)
        self._add_time(request.time_s)
        self._add_blocks(request)

    @property
    def block_optimum(self) -> float:
        """Hit rate of an infinite cache: of all blocks, those seen before."""
        return 1 - self.num_blocks / max(1, self.num_block_references)

    @property
    def token_optimum(self) -> float:
        """Hit rate of an infinite cache: 1 - sum of edges / sum of tokens."""
        return 1 - self.num_new_tokens / max(1, self.num_input_tokens)

    def as_json(self) -> dict[str, object]:
        """Return the counts as they are written to a file."""
        return {
            "requests": self.num_requests,
            "continuing_requests": self.num_continuing,
            "sessions": len(self.sessions),
            "tenants": len(self.tenants),
            "input_tokens": self.num_input_tokens,
            "output_tokens": self.num_output_tokens,
            "longest_input_tokens": self.longest_input_tokens,
            "block_references": self.num_block_references,
            "unique_blocks": self.num_blocks,
            "unique_tokens": self.num_new_tokens,
            "optimum": {"blocks": self.block_optimum, "tokens": self.token_optimum},
            "first_s": self.first_s,
            "last_s": self.last_s,
            "is_in_order": self.is_in_order,
        }

    def _add_time(self, time_s: float | None) -> None:
        if time_s is None:
            return
        if self.last_s is not None and time_s < self.last_s:
            self.is_in_order = False
        self.first_s = time_s if self.first_s is None else min(self.first_s, time_s)
        self.last_s = time_s if self.last_s is None else max(self.last_s, time_s)

    def _add_blocks(self, request: TraceRequest) -> None:
        if not request.blocks:
            return
        ids = np.frombuffer(request.blocks, np.int32)
        if (top := int(ids.max()) + 1) > len(self._seen):
            grown = np.zeros(max(top, 2 * len(self._seen)), np.bool_)
            grown[: len(self._seen)] = self._seen
            self._seen = grown
        # Ids are chained: where one is new, all after it are.
        num_new = len(ids) - int(np.count_nonzero(self._seen[ids]))
        self._seen[ids] = True
        num_hit_tokens = (len(ids) - num_new) * self.block_size
        self.num_block_references += len(ids)
        self.num_blocks += num_new
        self.num_new_tokens += max(0, request.num_input_tokens - num_hit_tokens)


def summarise(info: TraceInfo, requests: Iterable[TraceRequest]) -> Summary:
    """Read a trace to its end and return what it holds."""
    summary = Summary(info.block_size)
    for request in requests:
        summary.add(request)
    return summary
