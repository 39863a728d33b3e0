"""Processes that use one store until they are told to end, or are killed.

    python tests/torture_child.py KIND PATH BUDGET_NBYTES

Each line of its standard input, ``write SEED`` or ``mix SEED SECONDS``, is done by a process of its
own, which is forked, so that it starts at once. It says ``pid N``, what it does, and ``over CODE``
when it has ended, however.

``write`` puts, touches and deletes records of its own, and says so: ``put N`` once all records
below N were accepted, ``delete N`` before it deletes that one.
``mix`` reads, writes, deletes and scans records that others use too, and says how often as JSON.
"""

import asyncio
import json
import os
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

from hicache.backends.file import FileBackend
from hicache.backends.lmdb import LmdbBackend
from hicache.keys import PageKey
from hicache.storage import StorageBackend
from hicache.testing.records import key, record

BACKENDS: dict[str, type[LmdbBackend] | type[FileBackend]] = {
    "file": FileBackend,
    "lmdb": LmdbBackend,
}
MOST_NBYTES = 60_000
SHARED = range(600)


def written(seed: int, number: int) -> tuple[PageKey, bytes]:
    """Return the record that ``write`` puts as its ``number``-th."""
    name = ("written", seed, number)
    return key(name), record(name, Random(repr(name)).randrange(1, MOST_NBYTES))


def shared(number: int) -> tuple[PageKey, bytes]:
    """Return a record that every ``mix`` uses."""
    return key(number), record(number, 5_000 + 97 * number % 50_000)


def say(*words: object) -> None:
    """Say it whole or not at all, whenever we are killed."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


async def write(backend: StorageBackend, seed: int) -> None:
    random, number = Random(seed), 0
    while True:
        batch = [written(seed, at) for at in range(number, number + 8)]
        assert all(await backend.put([(name, [data]) for name, data in batch]))
        number += 8
        say("put", number)
        await backend.touch([name for name, _ in batch[:4]])
        if random.random() < 0.5:
            chosen = random.randrange(number)
            say("delete", chosen)
            await backend.delete([written(seed, chosen)[0]])


async def mix(backend: StorageBackend, seed: int, seconds: float) -> None:
    random, counts = Random(seed), Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch = [shared(number) for number in random.sample(SHARED, 8)]
        names = [name for name, _ in batch]
        draw = random.random()
        if draw < 0.45:
            counts["written"] += sum(await backend.put([(name, [data]) for name, data in batch]))
        elif draw < 0.9:
            counts["read"] += await check(backend, batch)
        elif draw < 0.94:
            await backend.touch(names)
        elif draw < 0.98:
            await backend.delete(names[:2])
            counts["deleted"] += 2
        else:
            known = {shared(number)[0] for number in SHARED}
            found = [name async for name, _ in backend.scan(16)]
            assert known.issuperset(found)
            counts["scanned"] += len(found)
    counts["evicted"] = (await backend.stats()).num_evicted
    say(json.dumps(counts))


async def check(backend: StorageBackend, batch: list[tuple[PageKey, bytes]]) -> int:
    """Read a batch; assert that each record is whole or absent; return how many were there."""
    buffers = [memoryview(bytearray(MOST_NBYTES)) for _ in batch]
    lengths = await backend.get([name for name, _ in batch], [[one] for one in buffers])
    for (_, data), buffer, length in zip(batch, buffers, lengths, strict=True):
        assert length is None or bytes(buffer[:length]) == data, "a wrong byte was read"
    return sum(length is not None for length in lengths)


async def use(kind: str, path: str, budget_nbytes: str, words: list[str]) -> None:
    async with BACKENDS[kind](Path(path), int(budget_nbytes)) as backend:
        if words[0] == "write":
            await write(backend, int(words[1]))
        else:
            await mix(backend, int(words[1]), float(words[2]))


def main(kind: str, path: str, budget_nbytes: str) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            say("pid", os.getpid())
            try:
                asyncio.run(use(kind, path, budget_nbytes, line.split()))
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        with suppress(ChildProcessError):
            _, status = os.waitpid(pid, 0)
            say("over", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
