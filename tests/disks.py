"""What tests of the disk backends share: where records lie, and other processes."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hicache.disk.options import DiskOptions
from hicache.storage import StorageBackend
from tests.disk_child import BACKENDS

MIB = 1024 * 1024
CHILD = Path(__file__).with_name("disk_child.py")


class FakeClock:
    """Time stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1.8e9

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Disk:
    """A store directory for one of the disk backends."""

    kind: str
    path: Path
    clock: FakeClock
    budget_nbytes: int = 64 * MIB
    options: DiskOptions | None = None

    def backend(self) -> StorageBackend:
        """Return a backend that is not open yet."""
        return BACKENDS[self.kind](
            self.path, self.budget_nbytes, clock=self.clock, options=self.options
        )

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[StorageBackend]:
        async with self.backend() as backend:
            yield backend

    def files(self) -> list[Path]:
        return [Path(folder, name) for folder, _, names in os.walk(self.path) for name in names]

    def nbytes(self) -> int:
        """Return the size of all files together; those that go meanwhile do not count."""
        total = 0
        for path in self.files():
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        return total

    def find(self, data: bytes) -> tuple[Path, int]:
        """Return the file that holds these bytes, and where in it they start."""
        for path in self.files():
            offset = path.read_bytes().find(data)
            if offset >= 0:
                return path, offset
        raise AssertionError("no file holds these bytes")

    @contextmanager
    def child(self, command: str, seed: int) -> "Iterator[subprocess.Popen[str]]":
        """Run another process on the store; kill it at the end, if it has not ended."""
        arguments = [self.kind, str(self.path), str(self.budget_nbytes), command, str(seed)]
        process = subprocess.Popen(
            [sys.executable, str(CHILD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()
