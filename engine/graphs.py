"""Decode batches as CUDA graphs: one launch for a whole forward.

Python hands a GPU a few hundred kernels a forward, and takes milliseconds for it: as long as a
large GPU takes to decode. A graph is recorded once for each of a few batch sizes, and replayed.
It does the same work on the same memory every time, so what changes from step to step is written
into that memory before, and a batch between two sizes is filled up.

Graphs are off where attention has no fixed form, and go off for good, with a warning, where one
cannot be recorded: a model may read a value back in the middle of its forward.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hicache.engine.attention import Attention, Indices, Span
from hicache.engine.page_tables import Padded, padded
from hicache.engine.placing import place

logger = logging.getLogger("hicache.engine.graphs")

Forward = Callable[[Tensor, Tensor, Attention], Tensor]
"""Logits of all rows, ``[rows, vocabulary]``, of token ids and positions ``[1, rows]``."""

Replay = Callable[[], None]
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]
"""Runs something as often as it likes; returns a result, and what computes it anew in place."""


class FixedAttention(Attention, Protocol):
    """Attention over a number of sequences that never changes, in memory that never moves."""

    def prepare(self, batch: Padded) -> None:
        """Have the next ``attend``, or the next replay of it, be over these sequences.

        All that is arriving in their pages must be there: a replay waits for nothing in between.
        """
        ...


class FixingBackend(Protocol):
    """A backend whose decode can be recorded."""

    def fixed(self, num_sequences: int, max_pages: int) -> FixedAttention:
        """Return decode over exactly so many sequences of at most so many pages each."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What graphs must be large enough for."""

    device: torch.device
    num_layers: int
    max_batch: int
    max_pages: int
    """Of one sequence."""


def batch_sizes(max_batch: int) -> list[int]:
    """Return the sizes to record: close together where batches are small."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 513, 16)]
    within = [size for size in sizes if size < max_batch]
    return [*within, max_batch]


class DecodeGraphs:
    """The graphs of one runner. Recorded when first needed, by the batch that needs one."""

    def __init__(
        self,
        backend: FixingBackend,
        forward: Forward,
        limits: Limits,
        record: Record | None = None,
    ) -> None:
        self._backend = backend
        self._forward = forward
        self._limits = limits
        self._record = _Recorder(limits.device) if record is None else record
        self._sizes = batch_sizes(limits.max_batch)
        self._graphs: dict[int, _Graph] = {}
        self.is_on = True
        """Whether every graph could be recorded so far."""

    def warm_up(self) -> None:
        """Record every graph. Only while no page of L1 is in use: the first one is written."""
        span, zero = Span(1, 0, np.zeros(1, dtype=np.int64)), np.zeros(1, dtype=np.int64)
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            self._run(size, [span], zero, zero)

    def forward(
        self,
        spans: Sequence[Span],
        token_ids: Indices,
        positions: Indices,
        wait: Callable[[int], None],
    ) -> Tensor | None:
        """Return logits ``[sequences, vocabulary]``; ``None`` where this is no batch for a graph.

        Afterwards the new tokens' keys and values are in the pages, in stream order.
        """
        if len(token_ids) > len(spans):
            return None
        size = next((size for size in self._sizes if size >= len(spans)), None)
        if size is None or any(len(span.slots) > self._limits.max_pages for span in spans):
            return None
        for layer in range(self._limits.num_layers):
            wait(layer)
        return self._run(size, spans, token_ids, positions)

    def _run(
        self, size: int, spans: Sequence[Span], token_ids: Indices, positions: Indices
    ) -> Tensor | None:
        if not self.is_on:
            return None
        graph = self._graphs.get(size)
        is_new = graph is None
        if graph is None:
            attention = self._backend.fixed(size, self._limits.max_pages)
            graph = _Graph(attention, size, self._limits.device)
        graph.fill(padded(spans, size), token_ids, positions)
        if is_new:
            try:
                graph.record(self._forward, self._record)
            except RuntimeError as error:
                self._turn_off(error)
                return None
            self._graphs[size] = graph
        return graph.compute(len(spans))

    def _turn_off(self, error: RuntimeError) -> None:
        self.is_on = False
        self._graphs.clear()
        line = " ".join(str(error).split())[:200]
        logger.warning("decoding without CUDA graphs: one could not be recorded: %s", line)


class _Graph:
    """A graph for one batch size, and the memory that it works on."""

    def __init__(self, attention: FixedAttention, size: int, device: torch.device) -> None:
        self._attention = attention
        self._ids = torch.zeros(1, size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(1, size, dtype=torch.int64, device=device)
        self._logits = torch.empty(0)
        self._replay: Replay | None = None

    def fill(self, batch: Padded, token_ids: Indices, positions: Indices) -> None:
        """Put a batch in."""
        device = self._ids.device
        self._ids[0].copy_(place(token_ids[batch.sources], device))
        self._positions[0].copy_(place(positions[batch.sources], device))
        self._attention.prepare(batch)

    def record(self, forward: Forward, record: Record) -> None:
        """Make the graph out of a forward over what was put in."""
        self._logits, self._replay = record(
            lambda: forward(self._ids, self._positions, self._attention)
        )

    def compute(self, num_sequences: int) -> Tensor:
        """Return the logits of the first sequences that were put in."""
        assert self._replay is not None
        self._replay()
        return self._logits[:num_sequences].clone()  # the next replay writes into the same memory


class _Recorder:
    """Records CUDA graphs, which share their memory: only one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Run it twice beside the current stream, as it must be before it is recorded; record."""
        current = torch.cuda.current_stream(self._device)
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(2):
                compute()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        return result, graph.replay
