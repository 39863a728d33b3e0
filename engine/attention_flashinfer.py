"""Attention over pages by FlashInfer's kernels, which read the pool where it is.

A layer's keys and values are strided views of the pool, ``pages[:, layer, 0]`` and
``pages[:, layer, 1]``: the kernels of the backend ``fa2`` take any strides, as long as both have
the same. Others copy, or are wrong, so ``fa2`` it is, also where FlashInfer would choose another.

A plan says how the work of one step is spread over the GPU. It depends on the page table and on
what tells one layer's attention from another's, so each group of layers that are alike has one
plan a step, made by the first of them. Decode runs on the kernels of prefill (tensor cores):
they take any number of query heads per key head, and half as many kernels have to be compiled.

What was read in FlashInfer's source, and is easy to get wrong:

- ``sinks=`` of ``run`` is ignored by ``fa2``, without a word. A sink takes weight and gives no
  value, so it scales the output: by ``exp(lse) / (exp(lse) + exp(sink))``. That is done here.
- ``lse`` is to the base 2.
- ``window_left`` counts the tokens before the own one, so it is a window less one.
- ``plan`` reads ``indptr`` and ``last_page_len`` on the host, and ``run`` reads ``indices`` on the
  device: each is handed over where it is read, so that nothing waits.
- ``plan`` fills a pinned buffer of the wrapper's, from which the GPU copies later: the next plan
  of that wrapper waits until it has.

Shapes: ``N`` pages of the pool, ``L`` layers, ``S`` tokens a page, ``H`` key-value heads, ``G``
query heads for each of them, ``D`` head size, ``T`` tokens of the row, ``n`` sequences.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Protocol, cast

import torch
from torch import Tensor

from hicache.engine.attention import Attention, Indices, Span, Traits
from hicache.engine.page_tables import Padded, PageTable, page_table, written_rows
from hicache.engine.page_writer import PageWriter
from hicache.engine.placing import Mark, mark, pinned, place

HEAD_DIMS = (64, 128, 256)
"""Head sizes that ``fa2`` has kernels for."""

COMPUTE_DTYPES = (torch.bfloat16, torch.float16)
PAGE_DTYPES = (*COMPUTE_DTYPES, torch.float8_e4m3fn)

WORKSPACE_NBYTES = 256 << 20
"""Where split attention keeps its parts: shared by all wrappers, which run one after the other."""


class Wrapper(Protocol):
    """What FlashInfer's two wrappers have in common."""

    @property
    def plan(self) -> Callable[..., None]:
        """Spread the work of a step over the GPU."""
        ...

    @property
    def run(self) -> Callable[..., object]:
        """Attend, as planned: the output, or with ``return_lse`` that and the log-sum-exp."""
        ...


class Library(Protocol):
    """What we use of the package ``flashinfer``."""

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]:
        """For sequences with any number of new tokens."""
        ...

    @property
    def BatchDecodeWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]:
        """For sequences with one new token each."""
        ...


def import_library() -> Library:
    """Return the package. Raises ``ImportError``, or whatever else it raises when imported."""
    return cast(Library, importlib.import_module("flashinfer"))


@dataclass(frozen=True, slots=True)
class Group:
    """What layers must have in common to share a plan."""

    num_query_heads: int
    scaling: float
    window: int | None
    softcap: float | None


class FlashInferBackend:
    """Attention by FlashInfer, over one pool."""

    name = "flashinfer"

    def __init__(
        self,
        pages: Tensor,
        dtype: torch.dtype,
        library: Library | None = None,
        workspace_nbytes: int = WORKSPACE_NBYTES,
    ) -> None:
        """``pages`` is the pool, ``[N, L, 2, S, H, D]``, contiguous; queries come in ``dtype``."""
        assert pages.is_contiguous()
        self.pages = pages
        self.dtype = dtype
        self.page_size = pages.shape[3]
        self._library = import_library() if library is None else library
        # Some of its kernels want it zero at first.
        self._workspace = torch.zeros(workspace_nbytes, dtype=torch.uint8, device=pages.device)
        self._prefill: dict[Group, _Plan] = {}
        self._decode: dict[Group, _Plan] = {}

    def begin(self, spans: Sequence[Span], wait: Callable[[int], None]) -> Attention:
        """Return what attends in one forward over these sequences."""
        device = self.pages.device
        table = page_table(spans, self.page_size)
        writer = PageWriter(self.pages, place(self.rows(spans), device))
        placed = _Placed.of(table, device)
        if table.is_decode:
            return _Forward(self, writer, placed, self._decode, self._decode_plan, wait)
        return _Forward(self, writer, placed, self._prefill, self._prefill_plan, wait)

    def fixed(self, num_sequences: int, max_pages: int) -> "FixedDecode":
        """Return decode over exactly so many sequences of at most so many pages each."""
        return FixedDecode(self, num_sequences, max_pages)

    def rows(self, spans: Sequence[Span]) -> Indices:
        """Return where the new tokens of sequences go."""
        _, num_layers, _, page_size, _, _ = self.pages.shape
        return written_rows(spans, page_size, num_layers * 2 * page_size)

    def decode_wrapper(self, buffers: "_Placed | None" = None) -> Wrapper:
        """Return a new wrapper for decode; with buffers, one that a CUDA graph can hold."""
        make = self._library.BatchDecodeWithPagedKVCacheWrapper
        if buffers is None:
            return make(self._workspace, "NHD", use_tensor_cores=True, backend="fa2")
        return make(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers.indptr,
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page_len,
            backend="fa2",
        )

    def _decode_plan(self) -> "_Plan":
        return _Plan(self.decode_wrapper(), self, is_decode=True)

    def _prefill_plan(self) -> "_Plan":
        make = self._library.BatchPrefillWithPagedKVCacheWrapper
        return _Plan(make(self._workspace, "NHD", backend="fa2"), self, is_decode=False)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A page table, each array where FlashInfer reads it."""

    query_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    @classmethod
    def of(cls, table: PageTable, device: torch.device) -> "_Placed":
        return cls(
            pinned(torch.from_numpy(table.query_indptr), device),
            pinned(torch.from_numpy(table.indptr), device),
            place(table.indices, device),
            pinned(torch.from_numpy(table.last_page_len), device),
        )


class _Plan:
    """A wrapper, planned again for every step that uses it."""

    def __init__(self, wrapper: Wrapper, backend: FlashInferBackend, is_decode: bool) -> None:
        self.wrapper = wrapper
        self._is_decode = is_decode
        self._pages = backend.pages
        self._dtype = backend.dtype
        self._planned: Mark | None = None

    def renew(self, table: _Placed, group: Group) -> None:
        """Plan for the page table of this step."""
        if self._planned is not None:
            self._planned.wait()
        _, _, _, page_size, num_heads, head_dim = self._pages.shape
        self.wrapper.plan(
            *(() if self._is_decode else (table.query_indptr,)),
            table.indptr,
            table.indices,
            table.last_page_len,
            group.num_query_heads,
            num_heads,
            head_dim,
            page_size,
            **({} if self._is_decode else {"causal": True}),
            sm_scale=group.scaling,
            window_left=-1 if group.window is None else group.window - 1,
            logits_soft_cap=group.softcap,
            q_data_type=self._dtype,
            kv_data_type=self._pages.dtype,
            non_blocking=True,
        )
        self._planned = mark(self._pages.device)


class _Forward:
    """One forward's attention."""

    def __init__(
        self,
        backend: FlashInferBackend,
        writer: PageWriter,
        table: _Placed,
        plans: dict[Group, _Plan],
        make_plan: Callable[[], _Plan],
        wait: Callable[[int], None],
    ) -> None:
        self._pages = backend.pages
        self._writer = writer
        self._table = table
        self._plans = plans
        self._make_plan = make_plan
        self._wait = wait
        self._planned: dict[Group, Wrapper] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: Traits
    ) -> Tensor:
        """Write the new tokens of this layer into their pages, then attend over all pages."""
        self._wait(layer)
        self._writer.write(layer, key, value)
        group = Group(query.shape[0], traits.scaling, traits.window, traits.softcap)
        wrapper = self._planned.get(group)
        if wrapper is None:
            wrapper = self._planned[group] = self._plan(group)
        return _run(wrapper, query, self._pages[:, layer], traits.sinks)

    def _plan(self, group: Group) -> Wrapper:
        plan = self._plans.get(group)
        if plan is None:
            plan = self._plans[group] = self._make_plan()
        plan.renew(self._table, group)
        return plan.wrapper


def _run(wrapper: Wrapper, query: Tensor, pages: Tensor, sinks: Tensor | None) -> Tensor:
    """Return ``[T, H * G, D]`` of ``query [H * G, T, D]`` and one layer, ``[N, 2, S, H, D]``."""
    rows = query.transpose(0, 1).contiguous()
    layer = (pages[:, 0], pages[:, 1])
    if sinks is None:
        return cast(Tensor, wrapper.run(rows, layer))
    output, lse = cast(tuple[Tensor, Tensor], wrapper.run(rows, layer, return_lse=True))
    shares = torch.sigmoid(lse * log(2) - sinks.float())  # [T, H * G]
    return (output.float() * shares.unsqueeze(-1)).to(output.dtype)


class FixedDecode:
    """Decode over a number of sequences that never changes, in memory that never moves.

    What a CUDA graph holds: ``attend`` gives the GPU the same work on the same memory every time,
    and ``prepare`` changes what is in that memory.
    """

    def __init__(self, backend: FlashInferBackend, num_sequences: int, max_pages: int) -> None:
        device = backend.pages.device
        self.num_sequences = num_sequences
        self._backend = backend
        self._rows = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        self._sources = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        self._buffers = _Placed(
            torch.empty(0),
            torch.zeros(num_sequences + 1, dtype=torch.int32, device=device),
            torch.zeros(num_sequences * max_pages, dtype=torch.int32, device=device),
            torch.zeros(num_sequences, dtype=torch.int32, device=device),
        )
        self._writer = PageWriter(backend.pages, self._rows, self._sources)
        self._plans: dict[Group, _Plan] = {}
        self._table: _Placed | None = None

    def prepare(self, batch: Padded) -> None:
        """Have the next ``attend``, or the next replay of it, be over these sequences.

        All that is arriving in their pages must be there: a replay waits for nothing in between.
        """
        assert len(batch.spans) == self.num_sequences
        backend, device = self._backend, self._backend.pages.device
        self._rows.copy_(place(backend.rows(batch.spans), device))
        self._sources.copy_(place(batch.sources, device))
        self._table = _Placed.of(page_table(batch.spans, backend.page_size), device)
        for group, plan in self._plans.items():
            plan.renew(self._table, group)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: Traits
    ) -> Tensor:
        """Write the new tokens of this layer into their pages, then attend over all pages."""
        self._writer.write(layer, key, value)
        group = Group(query.shape[0], traits.scaling, traits.window, traits.softcap)
        plan = self._plans.get(group)
        if plan is None:
            assert self._table is not None
            wrapper = self._backend.decode_wrapper(self._buffers)
            plan = _Plan(wrapper, self._backend, is_decode=True)
            plan.renew(self._table, group)
            self._plans[group] = plan
        return _run(plan.wrapper, query, self._backend.pages[:, layer], traits.sinks)
