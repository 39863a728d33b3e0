"""Stores for tests of ``hicache store``: prompts as real records, and what the commands say."""

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hicache.codec import PageCodec, encode_namespace
from hicache.keys import PageKey, PageRef, chain, pack
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.storage import StorageBackend
from hicache.testing.conformance import record as noise
from hicache.tools import cli
from tests.disk_child import BACKENDS

T = TypeVar("T")

KINDS = sorted(BACKENDS)
PAGE_SIZE = 4
LAYOUT = KVLayout(2, 1, 8, "float32", PAGE_SIZE)
BUDGET_NBYTES = 256 << 20
MODEL = json.dumps({"model_type": "llama", "hidden_size": 8})


def namespace(salt: str | None = None, weights: bytes = b"\x3f\xa9" * 16) -> Namespace:
    return Namespace(model_config=MODEL, weights=weights, layout=LAYOUT).salted(salt)


def pages_of(space: Namespace, ids: Sequence[int]) -> list[PageRef]:
    """Return the whole pages of a prompt."""
    nbytes = 4 * PAGE_SIZE
    tokens = pack(ids[: len(ids) // PAGE_SIZE * PAGE_SIZE])
    keys = chain(space.digest, tokens, nbytes)
    parents = [space.digest, *keys]
    return [
        PageRef(key, parent, at, tokens[at * nbytes : (at + 1) * nbytes])
        for at, (key, parent) in enumerate(zip(keys, parents, strict=False))
    ]


def record_of(space: Namespace, page: PageRef, created: float | None = None) -> bytes:
    """Return the record of a page, filled with noise that its key decides."""
    codec = PageCodec(PAGE_SIZE, LAYOUT.page_nbytes)
    whole = bytearray(codec.record_nbytes)
    view = memoryview(whole)
    view[codec.header_nbytes :] = noise(page.key, LAYOUT.page_nbytes)
    created_us = int((time.time() if created is None else created) * 1e6)
    codec.encode(
        view[: codec.header_nbytes], view[codec.header_nbytes :], page, space.digest, created_us
    )
    return bytes(whole)


def description_of(space: Namespace, created: float | None = None) -> tuple[PageKey, bytes]:
    created_us = int((time.time() if created is None else created) * 1e6)
    parts = encode_namespace(space.digest, space.descriptor, created_us)
    return PageKey(space.digest), b"".join(parts)


class Made:
    """A store of one kind of backend in a directory, and the commands on it."""

    def __init__(self, kind: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.kind = kind
        self.path = path
        self._capsys = capsys

    def on(self, work: "Coroutine[Any, Any, T]") -> T:
        return asyncio.run(work)

    def opened(self) -> StorageBackend:
        return BACKENDS[self.kind](self.path, BUDGET_NBYTES)

    def put(self, *items: tuple[PageKey, bytes]) -> None:
        """Put records."""

        async def work() -> None:
            async with self.opened() as backend:
                for start in range(0, len(items), 128):
                    some = items[start : start + 128]
                    assert all(await backend.put([(key, [data]) for key, data in some]))

        asyncio.run(work())

    def fill(self, space: Namespace, *prompts: Sequence[int]) -> list[list[PageRef]]:
        """Put prompts, and what their namespace is; return their pages."""
        pages = [pages_of(space, ids) for ids in prompts]
        distinct = {page.key: page for prompt in pages for page in prompt}
        self.put(
            description_of(space),
            *((page.key, record_of(space, page)) for page in distinct.values()),
        )
        return pages

    def delete(self, *keys: PageKey) -> None:
        async def work() -> None:
            async with self.opened() as backend:
                await backend.delete(keys)

        asyncio.run(work())

    def held(self) -> set[PageKey]:
        """Return the keys of all records that can be read."""

        async def work() -> set[PageKey]:
            async with self.opened() as backend:
                return {key async for key, _ in backend.scan(8)}

        return asyncio.run(work())

    def run(self, *argv: str, code: int = 0) -> str:
        """Run a command on the store; return what it prints."""
        done, _ = self.tried(*argv)
        assert done == code, (done, self.printed, self.said)
        return self.printed

    def tried(self, *argv: str) -> tuple[int, str]:
        """Run a command on the store; return its exit code and what it says beside results."""
        self._capsys.readouterr()
        done = cli.main(["store", *argv, "--path", str(self.path)])
        self.printed, self.said = self._capsys.readouterr()
        return done, self.said

    def told(self, *argv: str, code: int = 0) -> Any:
        """Run a command on the store; return what it tells machines."""
        return json.loads(self.run(*argv, "--json", code=code))

    def file_of(self, data: bytes) -> tuple[Path, int]:
        """Return the file that holds these bytes, and where in it they start."""
        for path in self.path.rglob("*"):
            if path.is_file() and (at := path.read_bytes().find(data)) >= 0:
                return path, at
        raise AssertionError("no file holds these bytes")

    def flip(self, data: bytes, at: int) -> None:
        """Change a byte of the record that holds ``data``, on disk."""
        path, start = self.file_of(data)
        content = bytearray(path.read_bytes())
        content[start + at] ^= 1
        path.write_bytes(content)
