"""Section 2: attention over pages, by FlashInfer and by torch, against arithmetic in float32."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hicache.engine.attention import AttentionBackend, Span, Traits, never_wait
from hicache.engine.attention_choice import open_attention, why_not_flashinfer
from hicache.tools.gpucheck.findings import Report
from hicache.tools.gpucheck.reference import attend
from hicache.tools.gpucheck.running import Room

_LAYERS = 3
_LAYER = 1
"""The one that attends: the others' bytes must not change."""

_MIXED = ((17, 0), (1, 130), (40, 200), (5, 63), (1, 0), (70, 1000))
_DECODES = ((1, 0), (1, 15), (1, 16), (1, 511), (1, 77), (1, 1200))
"""New tokens of each sequence, and those that are in its pages already."""

_COMPILING_S = 60.0
"""What may pass until FlashInfer's compiler is through with one kind of attention."""

_TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Of outputs that are about 1: some units in the last place of the dtype."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of attention."""

    name: str
    head_dim: int
    num_heads: int = 2
    num_query_heads: int = 8
    page_size: int = 64
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


CASES = (
    Case("plain, GQA 4", 128),
    Case("plain, GQA 3, pages of 16", 64, 3, 9, 16),
    Case("sinks", 64, has_sinks=True),
    Case("window of 100", 128, window=100),
    Case("plain, no GQA", 256, 2, 2),
    Case("window of 100 and softcap", 256, window=100, softcap=30.0),
    Case("softcap", 128, softcap=30.0),
    Case("window of 65 and sinks", 64, window=65, has_sinks=True),
    Case("GQA 8, pages of 1", 128, 1, 8, 1),
)
"""Most wanted first: what FlashInfer compiles takes part of a minute a kernel, once."""


def run(room: Room, report: Report) -> None:
    """Check every case by torch, and as many as there is time for by FlashInfer."""
    device = torch.device(room.device)
    dtypes = (torch.float32,) if room.is_small else (torch.bfloat16, torch.float16)
    for case in CASES:
        for dtype in dtypes:
            _check(case, device, dtype, "torch", report)
    for dtype in (torch.bfloat16, torch.float16):
        why = why_not_flashinfer(device, dtype, dtype, 128)
        if why is not None:
            report.note(f"FlashInfer was not checked: {why}")
            return
        for case in CASES:
            if not room.has(_COMPILING_S):
                report.note(f"FlashInfer: {case.name} in {dtype} and all after it: no time left")
                return
            _check(case, device, dtype, "flashinfer", report)


def _check(case: Case, device: torch.device, dtype: torch.dtype, name: str, report: Report) -> None:
    title = f"{name}, heads of {case.head_dim}, {case.name}, {str(dtype).removeprefix('torch.')}"
    for batch, sequences in (("mixed", _MIXED), ("decodes", _DECODES)):
        world = _World(case, sequences, device, dtype)
        backend = open_attention(
            "flashinfer" if name == "flashinfer" else "torch", world.pages, dtype
        )
        off, is_written = world.compare(backend)
        most = _TOLERANCE[dtype]
        report.result(f"{title}, {batch}", off <= most, f"off by {off:.2g}, {most:g} allowed")
        if not is_written:
            report.result(f"{title}, {batch}: pages hold what was computed", False)


class _World:
    """A pool of random pages, and sequences whose pages lie in it anyhow."""

    def __init__(
        self,
        case: Case,
        sequences: Sequence[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        random = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(device, dtype)

        self.case = case
        each = [-(-(new + start) // case.page_size) for new, start in sequences]
        num_pages = sum(each) + 7
        order = torch.randperm(num_pages, generator=random).numpy()
        self.pages = normal(num_pages, _LAYERS, 2, case.page_size, case.num_heads, case.head_dim)
        ends = np.cumsum(each)
        self.spans = [
            Span(new, start, order[end - count : end].astype(np.int64))
            for (new, start), end, count in zip(sequences, ends, each, strict=True)
        ]
        num_tokens = sum(new for new, _ in sequences)
        self.query = normal(case.num_query_heads, num_tokens, case.head_dim)
        self.key = normal(case.num_heads, num_tokens, case.head_dim)
        self.value = normal(case.num_heads, num_tokens, case.head_dim)
        sinks = normal(case.num_query_heads) if case.has_sinks else None
        self.traits = Traits(case.head_dim**-0.5, case.window, case.softcap, sinks)

    def compare(self, backend: AttentionBackend) -> tuple[float, bool]:
        """Return how far a backend is off, and whether the pool holds what it should then."""
        expected_pages = self._written()
        expected = attend(expected_pages[:, _LAYER], self.spans, self.query, self.traits)
        forward = backend.begin(self.spans, never_wait)
        found = forward.attend(_LAYER, self.query, self.key, self.value, self.traits)
        off = float((found.float() - expected).abs().max())
        is_written = torch.equal(self.pages, expected_pages)
        return off if off == off else float("inf"), is_written

    def _written(self) -> Tensor:
        """Return the pool with the new tokens where they belong, put there one by one."""
        pages = self.pages.clone()
        token = 0
        for span in self.spans:
            for position in range(span.start, span.start + span.num_tokens):
                slot = int(span.slots[position // self.case.page_size])
                offset = position % self.case.page_size
                pages[slot, _LAYER, 0, offset] = self.key[:, token]
                pages[slot, _LAYER, 1, offset] = self.value[:, token]
                token += 1
        return pages
