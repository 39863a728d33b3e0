"""Copies of pages between L1 and L2, beside the computation."""

from hicache.pools import DevicePool, HostPool
from hicache.transfer.base import Transfer, Wake
from hicache.transfer.cpu import CpuTransfer
from hicache.transfer.cuda import CudaTransfer
from hicache.transfer.streams import CudaStreams

__all__ = ["CpuTransfer", "CudaTransfer", "Transfer", "open_transfer"]


def open_transfer(device: DevicePool, host: HostPool, wake: Wake | None = None) -> Transfer:
    """Return what copies between these pools: on streams where L1 is on a GPU, else in a thread.

    ``wake`` is set when something can be drained, unless the transfer ``is_polled``.
    """
    if device.is_cuda:
        return CudaTransfer(device, host, CudaStreams(device.pages.device))
    return CpuTransfer(device, host, wake)
