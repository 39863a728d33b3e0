"""Which attention a model gets: what the settings ask for, if it fits the model and the device."""

import logging
from typing import Literal

import torch
from torch import Tensor

from hicache.engine.attention import AttentionBackend
from hicache.engine.attention_flashinfer import (
    COMPUTE_DTYPES,
    HEAD_DIMS,
    PAGE_DTYPES,
    FlashInferBackend,
    import_library,
)
from hicache.engine.paged import TorchBackend

logger = logging.getLogger("hicache.engine.attention")

AttentionName = Literal["torch", "flashinfer"]

MIN_CAPABILITY = (8, 0)
"""Of GPUs whose tensor cores take bfloat16: Ampere and later."""


def choose_attention(
    asked: Literal["auto", "torch", "flashinfer"],
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
) -> AttentionName:
    """Return what will be used; where it is less than what could be hoped for, say why in a line.

    FlashInfer is imported here or never.
    """
    if asked == "torch" or (asked == "auto" and device.type == "cpu"):
        return "torch"
    why = why_not_flashinfer(device, dtype, kv_dtype, head_dim)
    if why is None:
        return "flashinfer"
    logger.warning("attention by torch, which is slower than FlashInfer: %s", why)
    return "torch"


def why_not_flashinfer(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int
) -> str | None:
    """Return what keeps FlashInfer from being used; ``None`` where nothing does."""
    if device.type != "cuda":
        return f"it needs a GPU, and the device is {device}"
    if dtype not in COMPUTE_DTYPES or kv_dtype not in PAGE_DTYPES:
        return f"it does not compute {_name(dtype)} on pages of {_name(kv_dtype)}"
    if head_dim not in HEAD_DIMS:
        return f"it has no kernels for heads of {head_dim}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than its kernels"
    try:
        import_library()
    except ModuleNotFoundError as error:
        return f"it is not installed ({error.name} is missing): pip install flashinfer-python"
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        return f"it cannot be imported: {' '.join(str(error).split())[:200]}"
    return None


def open_attention(name: AttentionName, pages: Tensor, dtype: torch.dtype) -> AttentionBackend:
    """Return attention over a pool, ``[N, L, 2, S, H, D]``, for queries in ``dtype``."""
    if name == "flashinfer":
        return FlashInferBackend(pages, dtype)
    return TorchBackend(pages, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
