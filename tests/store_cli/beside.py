"""A process that writes, reads and evicts prompts in a store until its standard input ends.

    python -m tests.store_cli.beside KIND PATH BUDGET_NBYTES

It proves all that it reads, and says at the end what it has done.
"""

import asyncio
import sys
import threading
from collections import Counter
from pathlib import Path
from random import Random

from hicache.codec import prove
from hicache.errors import StorageFull
from hicache.storage import StorageBackend
from tests.disk_child import BACKENDS
from tests.store_cli.made import LAYOUT, description_of, namespace, pages_of, record_of

SPACE = namespace("beside")
NUM_PAGES = 96
_PAUSE_S = 0.02


async def use(backend: StorageBackend, is_over: threading.Event) -> Counter[str]:
    counts: Counter[str] = Counter()
    random = Random(1)
    key, data = description_of(SPACE)
    await backend.put([(key, [data])])
    number = 0
    is_full = False
    while not is_over.is_set():
        number += 1
        pages = pages_of(SPACE, [number, *range(4 * NUM_PAGES)])
        try:
            await backend.put([(page.key, [record_of(SPACE, page)]) for page in pages])
        except StorageFull:  # as for a server: what is not stored is a miss later
            counts["full"] += 1
        again = pages_of(SPACE, [random.randrange(1, number + 1), *range(4 * NUM_PAGES)])
        buffers = [memoryview(bytearray(2 * LAYOUT.page_nbytes)) for _ in again]
        lengths = await backend.get([page.key for page in again], [[one] for one in buffers])
        for page, buffer, length in zip(again, buffers, lengths, strict=True):
            if length is not None:
                assert prove(page.key, buffer[:length]).tokens == page.tokens
            counts["hit" if length else "missed"] += 1
        try:
            await backend.touch([key, *(page.key for page in again[:3])])
            await backend.delete([page.key for page in again[90:]])
        except StorageFull:
            counts["full"] += 1
        if is_full:
            await asyncio.sleep(_PAUSE_S)
        elif (await backend.stats()).num_evicted:
            is_full = True
            print("ready", flush=True)
    counts["evicted"] = (await backend.stats()).num_evicted
    return counts


async def main(kind: str, path: str, budget_nbytes: str) -> None:
    is_over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait, daemon=True).start()
    async with BACKENDS[kind](Path(path), int(budget_nbytes)) as backend:
        print(dict(await use(backend, is_over)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
