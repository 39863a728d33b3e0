"""The one form that every trace is turned into.

It knows nothing of files: ``opening`` makes a ``Trace`` from one, ``generating`` makes requests
from a seed.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, as a cache sees it."""

    time_s: float | None
    """When it arrives. In a trace with ``TraceInfo.has_times`` since one zero of all, else since
    the start of its session; ``None`` where the trace does not say."""
    session: str
    """Equal for the requests of one conversation or agent; its own where the trace does not say."""
    tenant: str
    """Requests of different tenants share no block; empty where the trace does not say."""
    num_input_tokens: int
    num_output_tokens: int
    """0 where the trace does not say."""
    blocks: "array[int]"
    """An id for each block of the whole input, the last, partial one included.

    ``array('i')``, global within the trace and chained: two requests have the same id only where
    they have the same tokens up to the end of that block. In a trace without blocks all differ.
    """
    parent: int | None = None
    """Index in the trace of the request that this one continues; always an earlier one."""


@dataclass(slots=True)
class TraceInfo:
    """What is known of a trace as a whole."""

    format: str
    block_size: int
    """Tokens a block."""
    has_times: bool
    """Whether ``time_s`` has one zero for all requests; else somebody must say when sessions
    start."""
    has_blocks: bool
    """Whether the trace tells what its requests share; without, nothing can be shared."""
    note: str = ""
    """What a reader of results must know of the trace; one line."""
    num_bad_lines: int = 0
    """Lines left out so far: it grows while the trace is iterated."""
    bad_lines: list[str] = field(default_factory=list)
    """What was wrong with the first of them, as ``file:line: what``."""


class Trace:
    """Requests in the order of the file, read while they are asked for.

    It can be iterated again, from the start, and then gives the same; one read from stdin cannot.
    """

    def __init__(self, info: TraceInfo, read: Callable[[], Iterator[TraceRequest]]) -> None:
        self.info = info
        self._read = read

    def __iter__(self) -> Iterator[TraceRequest]:
        """Give the requests; ``InputError`` in one line where the file ends to make sense."""
        return self._read()
