"""Whole reads and writes, whatever the system does of each call."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.disk import vector
from hicache.disk.vector import limit, nbytes_of, read_all, write_all

PARTS = st.lists(st.binary(max_size=50), max_size=30)


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system do no more than 7 bytes a call, of 3 buffers at most."""
    monkeypatch.setattr(vector, "IOV_MAX", 3)
    monkeypatch.setattr(vector, "_WRITE_NBYTES", 11)
    pwritev, preadv = os.pwritev, os.preadv

    def write(fd: int, buffers: Any, offset: int) -> int:
        assert len(buffers) <= 3
        assert nbytes_of(buffers) <= 11
        return pwritev(fd, limit([memoryview(buffer) for buffer in buffers], 7), offset)

    def read(fd: int, buffers: Any, offset: int) -> int:
        assert len(buffers) <= 3
        return preadv(fd, limit(buffers, 7), offset)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.usefixtures("short_calls")
@given(parts=PARTS, sizes=st.lists(st.integers(0, 60), max_size=30), offset=st.integers(0, 9))
def test_short_calls_add_up(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], sizes: list[int], offset: int
) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "vector"
    data = bytes(offset) + b"".join(parts)
    buffers = [memoryview(bytearray(size)) for size in sizes]
    path.unlink(missing_ok=True)
    with open(path, "x+b", buffering=0) as file:
        write_all(file.fileno(), parts, offset)
        if parts and any(parts):
            assert path.read_bytes() == data

        count = read_all(file.fileno(), buffers, offset)

    expected = b"".join(parts)[: sum(sizes)]
    assert count == len(expected)
    assert b"".join(buffers)[:count] == expected


@given(sizes=st.lists(st.integers(0, 20), max_size=10), nbytes=st.integers(0, 250))
def test_a_limit_keeps_the_first_bytes(sizes: list[int], nbytes: int) -> None:
    buffers = [memoryview(bytes([at]) * size) for at, size in enumerate(sizes)]

    limited = limit(buffers, nbytes)

    assert b"".join(limited) == b"".join(buffers)[:nbytes]
