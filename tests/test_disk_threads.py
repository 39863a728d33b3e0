"""Threads of the disk backends: what they give back, and that they hold nobody up at the end."""

import asyncio
import subprocess
import sys
import threading

import pytest

from hicache.disk.threads import Threads

HANGS = """
import asyncio, threading
from hicache.disk.threads import Threads

async def main():
    threads = Threads("hung", 2)
    has_begun = threading.Event()
    def hang():
        has_begun.set()
        threading.Event().wait()
    threads.executor.submit(hang)
    has_begun.wait()
    print(await threads.run(lambda: "served"))

asyncio.run(main())
"""


def test_a_call_that_hangs_does_not_keep_the_process_from_ending() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=False
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "served\n", "")


def test_what_a_function_raises_comes_to_whoever_waits_for_it() -> None:
    threads = Threads("failing", 1)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(threads.run(lambda: 1 // 0))

    threads.close()
    with pytest.raises(RuntimeError, match="failing is closed"):
        asyncio.run(threads.run(lambda: 0))


def test_closing_waits_for_all_that_was_started() -> None:
    threads = Threads("closing", 2)
    go_on = threading.Event()
    done: list[int] = []

    def work(number: int) -> None:
        go_on.wait()
        done.append(number)

    for number in range(6):
        threads.executor.submit(work, number)
    go_on.set()
    threads.close()

    assert sorted(done) == list(range(6))
