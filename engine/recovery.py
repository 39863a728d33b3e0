"""What a failed forward means: whether the device can still be used."""

import logging

import torch

logger = logging.getLogger("hicache.engine.recovery")

_SIGNS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")


def is_device_error(error: BaseException) -> bool:
    """Whether an error comes from a GPU, and not for want of its memory."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    return any(sign in str(error) for sign in _SIGNS)


def is_device_well(device: torch.device) -> bool:
    """Whether a device still computes. After most errors a GPU does not, for this process."""
    try:
        result = torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        logger.debug("%s does not compute any more: %s", device, error)
        return False
    return result == 2


def one_line(error: BaseException) -> str:
    """Return an error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def release_memory() -> None:
    """Give back to the GPU what torch keeps for later. The failed forward's frames must be gone."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
