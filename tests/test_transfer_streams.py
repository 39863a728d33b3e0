"""What a copy is to torch, and to the CUDA runtime: the same bytes."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hicache.transfer.runs import Run
from hicache.transfer.streams import Runtime, copy_with_torch, load_runtime

CHOSEN = [Run(0, 2, 2), Run(5, 0, 1), Run(3, 6, 2)]
NUM_PAGES, PAGE_NBYTES = 8, 24
STREAM = 77


class FakeFunction:
    """A function of a library: ctypes lets its types be set."""

    def __init__(self, body: Callable[..., int]) -> None:
        self.argtypes: Sequence[Any] = ()
        self.restype: Any = None
        self._body = body

    def __call__(self, *arguments: int) -> int:
        assert len(arguments) == len(self.argtypes)
        return self._body(*arguments)


class FakeLibrary:
    """libcudart on memory of the host."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.kinds: list[int] = []
        self.num_errors_taken = 0
        self.cudaMemcpyAsync: Any = FakeFunction(self.copy)
        self.cudaMemcpy2DAsync: Any = FakeFunction(self.copy_rows)
        self.cudaGetLastError: Any = FakeFunction(self.last_error)

    def copy(self, to: int, origin: int, nbytes: int, kind: int, stream: int) -> int:
        assert stream == STREAM
        self.kinds.append(kind)
        if self.code == 0:
            ctypes.memmove(to, origin, nbytes)
        return self.code

    def copy_rows(
        self, to: int, to_pitch: int, origin: int, pitch: int, width: int, height: int, *rest: int
    ) -> int:
        assert width <= pitch == to_pitch
        for row in range(height):
            self.copy(to + row * to_pitch, origin + row * pitch, width, *rest)
        return self.code

    def last_error(self) -> int:
        self.num_errors_taken += 1
        return self.code


@pytest.mark.parametrize("part", [slice(0, 24), slice(0, 8), slice(8, 24)])
def test_the_runtime_and_torch_copy_the_same_bytes(part: slice) -> None:
    source = torch.randint(256, (NUM_PAGES, PAGE_NBYTES), dtype=torch.uint8)
    expected = torch.zeros_like(source)
    for from_slot, to_slot, length in CHOSEN:
        rows = source[from_slot : from_slot + length, part]
        expected[to_slot : to_slot + length, part] = rows
    by_torch, by_runtime = torch.zeros_like(source), torch.zeros_like(source)

    copy_with_torch(by_torch, source, CHOSEN, part)
    Runtime(FakeLibrary()).copy(by_runtime, source, CHOSEN, part, STREAM)

    assert torch.equal(by_torch, expected)
    assert torch.equal(by_runtime, expected)


def test_a_copy_that_the_runtime_refuses_is_an_error_that_it_then_forgets() -> None:
    library = FakeLibrary(code=1)
    pool = torch.zeros(NUM_PAGES, PAGE_NBYTES, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="refused a copy: error 1"):
        Runtime(library).copy(pool, pool.clone(), CHOSEN, slice(0, 8), STREAM)

    assert library.num_errors_taken == 1


def test_there_is_no_runtime_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    without = load_runtime()
    monkeypatch.setattr(torch.version, "cuda", "999.0")

    assert (without, load_runtime()) == (None, None)
