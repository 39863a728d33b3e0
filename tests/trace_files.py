"""Trace files of a few lines, and the simplest account of what their requests share."""

import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from hicache.tools.traces.normal import Trace, TraceRequest
from hicache.tools.traces.opening import open_trace

SHARED = Path(__file__).parent.parent.parent / "shared"


def real_trace(name: str) -> Path:
    """Return a real trace beside the checkout; skip the test where there is none."""
    path = SHARED / "traces" / name
    if not path.is_file():
        pytest.skip(f"{path.name} is not beside this checkout (../shared/traces)")
    return path


def lines(*records: object) -> str:
    """Return records as lines of JSON."""
    return "".join(json.dumps(record) + "\n" for record in records)


def opened(folder: Path, content: str | bytes, **options: object) -> Trace:
    """Write a trace file and open it."""
    path = folder / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_trace(path, **options)  # type: ignore[arg-type]


def blocks(requests: Iterable[TraceRequest]) -> list[list[int]]:
    """Return the block ids of each request."""
    return [request.blocks.tolist() for request in requests]


def shared_blocks(requests: Sequence[TraceRequest]) -> list[int]:
    """Return how many leading blocks of each request were in one before; one by one."""
    found = []
    for index, request in enumerate(requests):
        before = (_common(request.blocks, other.blocks) for other in requests[:index])
        found.append(max(before, default=0))
    return found


def unique_prefixes(sequences: Iterable[Sequence[object]]) -> int:
    """Return the number of different prefixes, which is that of edges of the tree of all."""
    return len({tuple(row[:end]) for row in sequences for end in range(1, len(row) + 1)})


def _common(one: "array[int]", other: "array[int]") -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
