"""Traces for tests: the one that ``shared`` has, and small ones made up."""

from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from hicache.tools.replay.optimum import Sharing, find_sharing
from hicache.tools.replay.workload import Workload, load
from hicache.tools.traces.normal import Trace, TraceInfo, TraceRequest
from hicache.tools.traces.opening import open_trace

SHARED = Path(__file__).parents[3] / "shared"
CONVERSATION = SHARED / "traces" / "mooncake_conversation_trace.jsonl.gz"

needs_shared = pytest.mark.skipif(not CONVERSATION.exists(), reason="no traces in ../shared")


@cache
def conversation() -> tuple[Workload, Sharing]:
    """Return the conversation trace, read once, and what its requests share."""
    workload = load(open_trace(CONVERSATION))
    return workload, find_sharing(workload)


def trace_of(
    requests: Sequence[Sequence[int]],
    *,
    block_size: int = 16,
    has_times: bool = True,
    gap_s: float = 1.0,
    sessions: Sequence[str] | None = None,
    parents: Sequence[int | None] | None = None,
    num_output_tokens: int = 10,
) -> Trace:
    """Return a trace of requests given as their blocks, all of them full."""

    def read() -> Iterator[TraceRequest]:
        for number, blocks in enumerate(requests):
            yield TraceRequest(
                number * gap_s, sessions[number] if sessions else str(number), "",
                len(blocks) * block_size, num_output_tokens, array("i", blocks),
                parents[number] if parents else None,
            )  # fmt: skip

    return Trace(TraceInfo("made up", block_size, has_times, True), read)
