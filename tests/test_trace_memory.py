"""How much memory a long trace takes: that of its different blocks, not of its length."""

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

MB = 10**6
READ = """
import json, resource, sys
from hicache.tools.traces.opening import open_trace

trace = open_trace("-")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
requests = blocks = 0
for request in trace:
    requests += 1
    blocks = max(blocks, request.blocks[-1] + 1)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"requests": requests, "blocks": blocks, "grown_nbytes": grown * 1024}))
"""


def hashed_lines() -> Iterator[bytes]:
    """Requests that continue earlier ones, a third of their blocks new."""
    chances, histories, number = random.Random(1), [[0]], 1
    for time in itertools.count():
        new = range(number, number + chances.randint(1, 400))
        number += len(new)
        ids = [*chances.choice(histories), *new]
        histories.append(ids[: chances.randint(1, 600)])
        del histories[:-50]
        length = 512 * len(ids)
        record = {"timestamp": time, "input_length": length, "hash_ids": ids}
        yield json.dumps(record, separators=(",", ":")).encode() + b"\n"


def conversations() -> Iterator[bytes]:
    """One array of conversations, all like one of a few: long, and with little in it."""
    message = {"from": "human", "value": "What is a page? " * 2000}
    items = [json.dumps({"id": str(n), "conversations": [message] * 9}) for n in range(5)]
    yield b"[" + items[0].encode()
    for item in itertools.cycle(items):
        yield b"," + item.encode()


def read(pieces: Iterator[bytes], end: bytes, nbytes: int) -> dict[str, int]:
    """Return what a process found that read a trace of so many bytes from a pipe."""
    with subprocess.Popen(
        [sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        written = 0
        while written < nbytes:
            written += process.stdin.write(next(pieces))
        process.stdin.write(end)
        process.stdin.close()
        found: dict[str, int] = json.loads(process.stdout.read())
    return found


@pytest.mark.slow
def test_a_long_trace_takes_a_few_bytes_a_different_block() -> None:
    found = read(hashed_lines(), b"", 60 * MB)

    assert found["blocks"] > 2 * MB
    # Two tables of 4 bytes a block, and room to grow by half twice over.
    assert found["grown_nbytes"] < 24 * found["blocks"] + 10 * MB


@pytest.mark.slow
def test_a_long_array_is_never_held_as_a_whole() -> None:
    found = read(conversations(), b"]", 100 * MB)

    assert found["requests"] > 300
    assert found["grown_nbytes"] < 20 * MB
