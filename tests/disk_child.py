"""A process that uses a store on its own, for tests that kill it or run beside it.

    python tests/disk_child.py KIND PATH BUDGET_NBYTES COMMAND SEED

``write``: puts records until it is killed; a line for each batch that was accepted.
``step``: the same, but only one batch for each line of its standard input.
``churn``: puts and deletes the same few records until its standard input ends.
``limited``: puts records where no file may grow beyond 512 KiB; a line that says how that went.
"""

import asyncio
import resource
import sys
import threading
from pathlib import Path
from random import Random

from hicache.backends.file import FileBackend
from hicache.backends.lmdb import LmdbBackend
from hicache.errors import StorageFull
from hicache.keys import PageKey
from hicache.storage import StorageBackend
from hicache.testing.records import key, record

BACKENDS: dict[str, type[LmdbBackend] | type[FileBackend]] = {
    "file": FileBackend,
    "lmdb": LmdbBackend,
}
CHURNED = range(6)
CHURNED_NBYTES = 100_000


def written(seed: int, number: int) -> tuple[PageKey, bytes]:
    """Return the record that ``write`` puts as its ``number``-th."""
    name = ("written", seed, number)
    return key(name), record(name, Random(repr(name)).randrange(1, 60_000))


async def step(backend: StorageBackend, seed: int) -> None:
    await write(backend, seed, is_stepped=True)


async def write(backend: StorageBackend, seed: int, is_stepped: bool = False) -> None:
    number = 0
    while not is_stepped or sys.stdin.readline():
        batch = [written(seed, at) for at in range(number, number + 8)]
        assert all(await backend.put([(name, [data]) for name, data in batch]))
        number += 8
        print(number, flush=True)


async def churn(backend: StorageBackend, seed: int) -> None:
    is_over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait, daemon=True).start()
    random = Random(seed)
    print("ready", flush=True)
    while not is_over.is_set():
        chosen = random.sample(CHURNED, 3)
        if random.random() < 0.6:
            await backend.put([(key(name), [record(name, CHURNED_NBYTES)]) for name in chosen])
        else:
            await backend.delete([key(name) for name in chosen])


async def limited(backend: StorageBackend, seed: int) -> None:
    limit = 512 * 1024
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    names = [(seed, number) for number in range(64)]
    num_full = 0
    for name in names:
        try:
            await backend.put([(key(name), [record(name, 50_000)])])
            await backend.put([(key(("large", name)), [record(name, 600_000)])])
        except StorageFull:
            num_full += 1
    num_whole = 0
    for name in names:
        buffer = memoryview(bytearray(600_000))
        for wanted, nbytes in ((key(name), 50_000), (key(("large", name)), 600_000)):
            (length,) = await backend.get([wanted], [[buffer]])
            assert length is None or bytes(buffer[:length]) == record(name, nbytes)
            num_whole += length is not None
    print(f"full {num_full}, whole {num_whole}", flush=True)


async def main(kind: str, path: str, budget_nbytes: str, command: str, seed: str) -> None:
    commands = {"write": write, "step": step, "churn": churn, "limited": limited}
    async with BACKENDS[kind](Path(path), int(budget_nbytes)) as backend:
        await commands[command](backend, int(seed))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
