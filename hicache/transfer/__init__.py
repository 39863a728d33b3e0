"""Copies of pages between L1 and L2, beside the computation."""

from hicache.pools import DevicePool, HostPool
from hicache.transfer.base import Transfer, Wake
from hicache.transfer.cpu import CpuTransfer
from hicache.transfer.cuda import CudaTransfer
from hicache.transfer.staging import warm_up
from hicache.transfer.streams import CudaStreams

__all__ = ["CpuTransfer", "CudaTransfer", "Transfer", "open_transfer"]


def open_transfer(
    device: DevicePool, host: HostPool, wake: Wake | None = None, staging_nbytes: int = 0
) -> Transfer:
    """Return what copies between these pools: on streams where L1 is on a GPU, else in a thread.

    ``wake`` is set when something can be drained, unless the transfer ``is_polled``.
    ``staging_nbytes`` of a GPU are a buffer for loads of scattered small pages.
    """
    if device.is_cuda:
        streams = CudaStreams(device.pages.device)
        if staging_nbytes:
            warm_up(device.pages.device)
        return CudaTransfer(device, host, streams, staging_nbytes=staging_nbytes)
    return CpuTransfer(device, host, wake)
