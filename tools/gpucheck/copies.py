"""Section 3: copies between L1 and L2: right while others write beside them, and how fast."""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hicache.events import OpId
from hicache.layout import KVLayout
from hicache.pools import CudaRegistrar, DevicePool, HostPool
from hicache.tools.gpucheck.findings import Report
from hicache.tools.gpucheck.running import Room
from hicache.transfer import CudaTransfer, Transfer, open_transfer
from hicache.transfer.staging import warm_up
from hicache.transfer.streams import CudaStreams

_LAYERS = 32
_KIB = 1024
_PAGES = (64 * _KIB, 256 * _KIB, 1024 * _KIB, 8192 * _KIB)
_SMALL_PAGES = (64 * _KIB, 256 * _KIB)
_NBYTES = 2 << 30
_STAGING_NBYTES = 64 * 10**6
_SMALL_NBYTES = 4 << 20


def run(room: Room, report: Report) -> None:
    """Check and measure pages of each size, whole and by layer group."""
    for page_nbytes in _SMALL_PAGES if room.is_small else _PAGES:
        if room.is_over:
            report.note(f"pages of {page_nbytes // _KIB} KiB and more were left out: no time")
            return
        _check_size(room, report, page_nbytes)


@dataclass(slots=True)
class Pools:
    """Two pools of as many pages, and what copies between them."""

    device: DevicePool
    host: HostPool
    transfer: Transfer

    @classmethod
    def open(
        cls,
        room: Room,
        page_nbytes: int,
        num_groups: int | None = None,
        staging_nbytes: int = 0,
        nbytes: int = _NBYTES,
    ) -> "Pools":
        """Reserve them; ``num_groups`` replaces the number of layer groups."""
        layout = KVLayout(_LAYERS, 1, page_nbytes // (_LAYERS * 2 * 16 * 2), "bfloat16", 16)
        assert layout.page_nbytes == page_nbytes
        num_pages = max(8, (_SMALL_NBYTES if room.is_small else nbytes) // page_nbytes)
        device = DevicePool(layout, num_pages, room.device)
        host = HostPool(layout, num_pages, CudaRegistrar() if device.is_cuda else None)
        if device.is_cuda:
            streams = CudaStreams(device.pages.device)
            if staging_nbytes:
                warm_up(device.pages.device)
            transfer = CudaTransfer(
                device, host, streams, num_groups, staging_nbytes=staging_nbytes
            )
            return cls(device, host, transfer)
        return cls(device, host, open_transfer(device, host))

    @property
    def num_pages(self) -> int:
        """Pages of each."""
        return self.device.num_pages

    def close(self) -> None:
        """End the copies, and give the memory back."""
        self.transfer.close()
        self.host.close()


def _check_size(room: Room, report: Report, page_nbytes: int) -> None:
    name = f"{page_nbytes // _KIB} KiB a page"
    pools = Pools.open(room, page_nbytes)
    try:
        if pools.device.is_cuda:
            report.result(f"{name}: L2 is pinned", pools.host.is_pinned)
        check_bytes(pools, report, name)
        plain_in, plain_out = _plain(pools)
        report.figure(f"{name}, plain copy to the device", plain_in, "GB/s")
        report.figure(f"{name}, plain copy from the device", plain_out, "GB/s")
        for order in ("neighbours", "shuffled"):
            there, back = _rates(pools, _slots(pools.num_pages, order))
            _share(report, f"{name}, {order}, back-up", there, plain_out)
            groups = pools.transfer.num_layer_groups
            _share(report, f"{name}, {order}, load in {groups} layer groups", back, plain_in)
    finally:
        pools.close()
    if pools.device.is_cuda:
        if pools.transfer.num_layer_groups > 1:
            whole = _load_rate(room, report, page_nbytes, "shuffled", num_groups=1)
            _share(report, f"{name}, shuffled, load in one piece", whole, plain_in)
        _decide_on_staging(room, report, page_nbytes, name)


def _load_rate(
    room: Room,
    report: Report,
    page_nbytes: int,
    order: str,
    num_groups: int | None = None,
    staging_nbytes: int = 0,
) -> float:
    """Return GB/s of loads in other pools; with a buffer, check their bytes as well."""
    pools = Pools.open(room, page_nbytes, num_groups, staging_nbytes)
    try:
        if staging_nbytes:
            check_bytes(
                pools,
                report,
                f"{page_nbytes // _KIB} KiB a page, by way of the buffer",
                of_neighbours=True,
            )
        return _rates(pools, _slots(pools.num_pages, order))[1]
    finally:
        pools.close()


def _decide_on_staging(room: Room, report: Report, page_nbytes: int, name: str) -> None:
    """Load host neighbours into scattered slots, without the buffer and with it."""
    order = "scattered from neighbours"
    plainly = _load_rate(room, report, page_nbytes, order)
    staged = _load_rate(room, report, page_nbytes, order, staging_nbytes=_STAGING_NBYTES)
    report.figure(f"{name}, {order}", plainly, "GB/s")
    report.figure(f"{name}, {order}, by way of the buffer", staged, "GB/s")
    pays = "pays" if staged > 1.1 * plainly else "does not pay"
    report.note(f"{name}: cache.device.staging_mb = {_STAGING_NBYTES // 10**6} {pays}")


def _share(report: Report, name: str, rate: float, plain: float) -> None:
    report.figure(name, rate, f"GB/s, {rate / plain:.0%} of plain")


# ---------------------------------------------------------------- are the bytes right?


def check_bytes(pools: Pools, report: Report, name: str, *, of_neighbours: bool = False) -> None:
    """Send half of L1 down and back into other slots, while the other half is written to."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(pools.num_pages, generator=generator)
    half = pools.num_pages // 2
    sent, others = order[:half], order[half:]
    back = sent[torch.randperm(half, generator=generator)]
    on_host = torch.randperm(pools.num_pages, generator=generator)[:half]
    if of_neighbours:
        on_host = torch.arange(half)
    raw = pools.device.pages.view(-1).view(torch.uint8).view(pools.num_pages, -1)
    raw.random_(0, 256)
    expected = raw[sent.to(raw.device)].cpu()
    noise = _Noise(raw, others)

    noise.make()
    pools.transfer.fence()
    pools.transfer.back_up(OpId(1), _array(sent), _array(on_host))
    noise.make()
    _finish(pools, OpId(1))
    raw[sent.to(raw.device)] = 0
    pools.transfer.fence()
    pools.transfer.load(OpId(2), _array(on_host), _array(back))
    noise.make()
    for layer in range(_LAYERS):
        pools.transfer.wait(OpId(2), layer)
    found = raw[back.to(raw.device)].cpu()
    _finish(pools, OpId(2))

    num_wrong = int((found != expected).any(dim=1).sum())
    report.result(f"{name}: bytes are equal after L1, L2, L1", num_wrong == 0, f"{half} pages")
    report.result(f"{name}: pages beside them are untouched by copies", noise.is_intact())


class _Noise:
    """Writes into the other pages, in the current stream and in one of its own."""

    def __init__(self, raw: Tensor, slots: Tensor) -> None:
        self._raw = raw
        self._halves = slots.to(raw.device).chunk(2)
        self._value = 0
        self._streams = CudaStreams(raw.device) if raw.is_cuda else None
        self._stream = self._streams.stream() if self._streams else None

    def make(self) -> None:
        self._value += 1
        self._raw[self._halves[0]] = self._value
        if self._streams is None or self._stream is None:
            self._raw[self._halves[1]] = self._value
            return
        self._stream.wait_event(self._streams.current().record_event())
        with self._streams.use(self._stream):
            self._raw[self._halves[1]] = self._value

    def is_intact(self) -> bool:
        if self._stream is not None:
            self._stream.synchronize()
        return all(bool((self._raw[half] == self._value).all()) for half in self._halves)


# ---------------------------------------------------------------- how fast?


def _plain(pools: Pools) -> tuple[float, float]:
    """Return GB/s of one copy of everything, to the device and from it."""
    device, host = pools.device.pages, pools.host.pages
    if pools.device.is_cuda:
        host = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    nbytes = device.nbytes

    def to_device() -> None:
        device.copy_(host, non_blocking=True)

    def from_device() -> None:
        host.copy_(device, non_blocking=True)

    return nbytes / _seconds(device, to_device) / 1e9, nbytes / _seconds(device, from_device) / 1e9


def _rates(pools: Pools, slots: tuple["array[int]", "array[int]"]) -> tuple[float, float]:
    """Return GB/s of back-ups and of loads of everything."""
    op = iter(range(10, 1000))
    nbytes = pools.device.pages.nbytes

    def back_up() -> None:
        number = OpId(next(op))
        pools.transfer.back_up(number, slots[0], slots[1])
        _finish(pools, number)

    def load() -> None:
        number = OpId(next(op))
        pools.transfer.load(number, slots[1], slots[0])
        _finish(pools, number)

    device = pools.device.pages
    return nbytes / _seconds(device, back_up) / 1e9, nbytes / _seconds(device, load) / 1e9


def _seconds(device: Tensor, work: Callable[[], None], repetitions: int = 3) -> float:
    """Return the least seconds of some repetitions, the device's part included."""
    took: list[float] = []
    for _ in range(1 + repetitions):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        took.append(time.perf_counter() - started)
    return min(took[1:])


def _synchronize(device: Tensor) -> None:
    if device.is_cuda:
        torch.cuda.synchronize(device.device)


def _finish(pools: Pools, op: OpId, timeout_s: float = 30.0) -> None:
    """Wait until a copy is over; raise where it failed."""
    end = time.monotonic() + timeout_s
    while True:
        for finished in pools.transfer.drain():
            if not all(finished.outcomes):
                raise RuntimeError(f"a copy of {len(finished.outcomes)} pages failed")
            if finished.op == op:
                return
        if time.monotonic() > end:
            raise RuntimeError(f"a copy did not end in {timeout_s:g} s")
        time.sleep(0.0001)


def _slots(num_pages: int, order: str) -> tuple["array[int]", "array[int]"]:
    """Return slots of L1 and of L2."""
    numbers = torch.arange(num_pages)
    if order == "neighbours":
        return _array(numbers), _array(numbers)
    generator = torch.Generator().manual_seed(2)
    shuffled = torch.randperm(num_pages, generator=generator)
    if order == "scattered from neighbours":
        return _array(shuffled), _array(numbers)
    return _array(shuffled), _array(torch.randperm(num_pages, generator=generator))


def _array(numbers: Tensor) -> "array[int]":
    return array("i", numbers.tolist())
