"""A stand-in for the package ``flashinfer`` that computes in plain torch what the real one would.

Signatures are those of flashinfer-python 0.7.4, as far as we may use them, and so are the rules:
what the real wrappers refuse is refused, what they ignore is ignored (sinks, by ``fa2``), what
they read on the host must be on the host. It reads the pool only through the views that it is
given, with their strides, and only where the plan says; it keeps what it planned, so that a test
can look at it.
"""

from dataclasses import dataclass, field
from math import log
from typing import Any

import torch
from torch import Tensor

PagedKV = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Planned:
    """What a wrapper was told for a step."""

    is_decode: bool
    query_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    sm_scale: float | None
    window_left: int
    logits_soft_cap: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype


@dataclass
class Log:
    """What was asked of all wrappers."""

    made: list["_Wrapper"] = field(default_factory=list)
    plans: list[Planned] = field(default_factory=list)
    runs: list[tuple[Planned, Tensor]] = field(default_factory=list)


class FakeFlashInfer:
    """What ``import flashinfer`` would give; every wrapper made through it shares one log."""

    def __init__(self) -> None:
        log_ = self.log = Log()

        class Prefill(BatchPrefillWithPagedKVCacheWrapper):
            log = log_

        class Decode(BatchDecodeWithPagedKVCacheWrapper):
            log = log_

        self.BatchPrefillWithPagedKVCacheWrapper = Prefill
        self.BatchDecodeWithPagedKVCacheWrapper = Decode


class _Wrapper:
    log = Log()

    def _begin(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        if kv_layout != "NHD" or backend != "fa2":
            raise NotImplementedError("only NHD pools and the backend fa2 are played here")
        self.workspace = workspace
        self.planned: Planned | None = None
        self.log.made.append(self)

    def _plan(self, planned: Planned) -> None:
        on_host = [planned.query_indptr, planned.indptr, planned.last_page_len]
        for values in [*on_host, planned.indices]:
            assert values.dtype == torch.int32, "kernels read int32"
            assert values.is_contiguous()
        assert all(values.device.type == "cpu" for values in on_host)
        assert planned.num_qo_heads % planned.num_kv_heads == 0
        self.planned = planned
        self.log.plans.append(planned)

    def _run(self, q: Tensor, cache: PagedKV, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
        planned = self.planned
        assert planned is not None, "run before plan"
        assert isinstance(cache, tuple)
        keys, values = cache
        if q.dtype != planned.q_data_type or keys.dtype != planned.kv_data_type:
            raise ValueError("the dtype does not match that specified in plan")
        assert keys.stride() == values.stride(), "K and V of other strides are another kernel"
        assert q.is_contiguous()
        assert q.shape == (planned.query_indptr[-1], planned.num_qo_heads, planned.head_dim)
        assert keys.shape[1:] == (planned.page_size, planned.num_kv_heads, planned.head_dim)
        self.log.runs.append((planned, keys))
        outputs, sums = attend(planned, q, keys, values)
        return (outputs, sums) if return_lse else outputs


def attend(planned: Planned, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and its log-sum-exp to the base 2, one sequence after the other."""
    outputs, sums = torch.empty_like(q), torch.empty(q.shape[:2])
    bounds, pages = planned.query_indptr.tolist(), planned.indptr.tolist()
    for index, last in enumerate(planned.last_page_len.tolist()):
        first, end = bounds[index], bounds[index + 1]
        own = planned.indices[pages[index] : pages[index + 1]].long()
        length = (len(own) - 1) * planned.page_size + last
        k = keys[own].flatten(0, 1)[:length].to(q.dtype).float()  # [length, H, D]
        v = values[own].flatten(0, 1)[:length].to(q.dtype).float()
        output, lse = _one(planned, q[first:end].float(), k, v)
        outputs[first:end], sums[first:end] = output.to(q.dtype), lse
    return outputs, sums


def _one(planned: Planned, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = planned.num_qo_heads // planned.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if planned.sm_scale is None else planned.sm_scale
    logits = torch.einsum("thd,shd->hts", q, k) * scale
    if planned.logits_soft_cap > 0:
        logits = planned.logits_soft_cap * torch.tanh(logits / planned.logits_soft_cap)
    own = torch.arange(len(k) - len(q), len(k))[:, None]
    seen = torch.arange(len(k))[None, :]
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if planned.causal:
        hidden |= seen > own
    if planned.window_left >= 0:
        hidden |= seen + planned.window_left < own
    logits = logits.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(logits, -1)  # [H, t]
    output = torch.einsum("hts,shd->thd", torch.exp(logits - lse.unsqueeze(-1)), v)
    return output, lse.T / log(2)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """For sequences with any number of new tokens."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        _refuse(use_cuda_graph=use_cuda_graph, jit_args=jit_args, mask=custom_mask_buf)
        self._begin(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        _refuse(mask=custom_mask, packed=packed_custom_mask, head_dim_vo=head_dim_vo)
        _refuse(rope=pos_encoding_mode != "NONE", output_dtype=o_data_type)
        q_dtype = _dtype(q_data_type)
        self._plan(
            Planned(
                False,
                qo_indptr,
                paged_kv_indptr,
                paged_kv_indices,
                paged_kv_last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                page_size,
                causal,
                sm_scale,
                window_left,
                logits_soft_cap or 0.0,
                q_dtype,
                q_dtype if kv_data_type is None else _dtype(kv_data_type),
            )
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        *args: object,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: PagedKV | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        _refuse(args=args, scales=q_scale or k_scale or v_scale, out=out, lse=lse)
        _refuse(window=window_left, scale_factors=kv_cache_sf)
        return self._run(q, paged_kv_cache, return_lse)  # and sinks go nowhere, as with fa2


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """For sequences with one new token each."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        _refuse(jit_args=jit_args)
        assert use_tensor_cores, "fa2 for decode is the kernel of prefill"
        self._begin(float_workspace_buffer, kv_layout, backend)
        self.buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        _refuse(rope=pos_encoding_mode != "NONE", output_dtype=o_data_type, both=data_type)
        if self.buffers is not None:
            if len(last_page_len) != len(self.buffers[2]):
                raise ValueError("the batch size should be fixed in cudagraph mode")
            if len(indices) > len(self.buffers[1]):
                raise ValueError("the size of indices should fit the allocated buffer")
            self.buffers[0].copy_(indptr)
            self.buffers[1][: len(indices)].copy_(indices)
            self.buffers[2].copy_(last_page_len)
            indptr, indices, last_page_len = self.buffers
        q_dtype = _dtype(q_data_type or "float16")
        self._plan(
            Planned(
                True,
                torch.arange(len(last_page_len) + 1, dtype=torch.int32),
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                False,
                sm_scale,
                window_left,
                logits_soft_cap or 0.0,
                q_dtype,
                q_dtype if kv_data_type is None else _dtype(kv_data_type),
            )
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        _refuse(args=args, scales=q_scale or k_scale or v_scale, out=out, lse=lse)
        _refuse(window=window_left, deprecated=q_len_per_req)
        return self._run(q, paged_kv_cache, return_lse)  # and sinks go nowhere, as with fa2


def _dtype(name: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, name) if isinstance(name, str) else name
    assert isinstance(found, torch.dtype)
    return found


def _refuse(**arguments: object) -> None:
    """Raise for arguments that the real ones take and nothing here understands."""
    for name, value in arguments.items():
        if value is not None and value is not False and value != ():
            raise NotImplementedError(f"{name} is not played here")
