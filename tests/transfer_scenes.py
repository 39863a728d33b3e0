"""Pools and a transfer on a fake GPU, and what has to come out at any speed of its streams."""

from array import array
from collections.abc import Callable
from functools import partial

from torch import Tensor

from hicache.events import OpId
from hicache.layout import KVLayout
from hicache.pools import DevicePool, HostPool
from hicache.transfer import CudaTransfer
from tests.fake_streams import FakeGpu, Fence
from tests.test_pools import FakeRegistrar

LAYOUT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=2, dtype="float32", page_size=2)
NUM_PAGES = 8
OP = OpId(1)


class Bench:
    """Pools of marked pages and a transfer between them, on a fake GPU."""

    def __init__(
        self,
        missing: frozenset[Fence] = frozenset(),
        num_pages: int = NUM_PAGES,
        num_layer_groups: int | None = 2,
        max_waiting_pages: int = 10_000,
        transfer_type: type[CudaTransfer] = CudaTransfer,
    ) -> None:
        self.gpu = FakeGpu(missing)
        self.device = DevicePool(LAYOUT, num_pages)
        self.host = HostPool(LAYOUT, num_pages, FakeRegistrar(), chunk_nbytes=1)
        for slot in range(num_pages):
            self.device.pages[slot] = slot
            self.host.pages[slot] = 100 + slot
        self.transfer = transfer_type(
            self.device, self.host, self.gpu, num_layer_groups, max_waiting_pages
        )

    def write(self, slot: int, value: float) -> None:
        """Compute a page of L1."""
        self.gpu.launch("forward", lambda: self.device.pages[slot].fill_(value))

    def read(self, slot: int, into: list[Tensor]) -> None:
        """Compute something that reads a page of L1."""
        self.gpu.launch("forward", lambda: into.append(self.device.pages[slot].clone()))


def slots(*numbers: int) -> "array[int]":
    return array("i", numbers)


def is_all(pages: Tensor, value: float) -> bool:
    return bool((pages == value).all())


# ---------------------------------------------------------------- each fence, with and without
# A scenario returns whether the bytes are right at the worst possible speed of the streams.


def a_load_comes_after_the_forward_that_wrote_its_slots(bench: Bench) -> bool:
    bench.write(3, -1)
    bench.transfer.load(OP, slots(0), slots(3))
    bench.gpu.run("load")
    return is_all(bench.device.pages[3], 100)


def a_load_comes_after_the_forward_that_reads_its_slots(bench: Bench) -> bool:
    seen: list[Tensor] = []
    bench.read(3, seen)
    bench.transfer.load(OP, slots(0), slots(3))
    bench.gpu.run("load")
    return is_all(seen[0], 3)


def a_load_comes_after_a_forward_in_another_stream(bench: Bench) -> bool:
    with bench.gpu.computing_in("graph"):
        bench.write(3, -1)
        bench.transfer.fence()
    bench.transfer.load(OP, slots(0), slots(3))
    bench.gpu.run("load")
    return is_all(bench.device.pages[3], 100)


def a_copied_page_comes_after_the_forward_that_computed_it(bench: Bench) -> bool:
    bench.write(2, -1)
    bench.transfer.copy_page(OP, "device", 2, 5)
    bench.gpu.run("page")
    return is_all(bench.device.pages[5], -1)


def a_copied_page_comes_after_the_load_that_brings_it(bench: Bench) -> bool:
    bench.transfer.load(OpId(1), slots(0), slots(3))
    bench.transfer.copy_page(OpId(2), "device", 3, 5)
    bench.gpu.run("page")
    return is_all(bench.device.pages[5], 100)


def a_back_up_comes_after_the_forward_that_computed_it(bench: Bench) -> bool:
    bench.write(2, -1)
    bench.transfer.back_up(OP, slots(2), slots(6))
    bench.gpu.run("back_up")
    return is_all(bench.host.pages[6], -1)


def a_back_up_comes_after_a_forward_in_another_stream(bench: Bench) -> bool:
    with bench.gpu.computing_in("graph"):
        bench.write(2, -1)
        bench.transfer.fence()
    bench.transfer.back_up(OP, slots(2), slots(6))
    bench.gpu.run("back_up")
    return is_all(bench.host.pages[6], -1)


def attention_comes_after_the_load(bench: Bench) -> bool:
    seen: list[Tensor] = []
    bench.transfer.load(OP, slots(0, 1), slots(3, 4))

    def attend(layer: int) -> None:
        seen.append(bench.device.pages[[3, 4], layer].clone())

    covered = 0
    for layer in range(LAYOUT.num_layers):
        if layer >= covered:
            covered = bench.transfer.wait(OP, layer)
        bench.gpu.launch("forward", partial(attend, layer))
    bench.gpu.run("compute")
    return all(is_all(pages[0], 100) and is_all(pages[1], 101) for pages in seen)


def attention_comes_after_the_copied_page(bench: Bench) -> bool:
    seen: list[Tensor] = []
    bench.transfer.copy_page(OP, "host", 1, 5)
    bench.transfer.wait(OP, LAYOUT.num_layers - 1)
    bench.read(5, seen)
    bench.gpu.run("compute")
    return is_all(seen[0], 101)


SCENARIOS: list[tuple[Callable[[Bench], bool], Fence]] = [
    (a_load_comes_after_the_forward_that_wrote_its_slots, ("load", "compute")),
    (a_load_comes_after_the_forward_that_reads_its_slots, ("load", "compute")),
    (a_load_comes_after_a_forward_in_another_stream, ("load", "graph")),
    (a_copied_page_comes_after_the_forward_that_computed_it, ("page", "compute")),
    (a_copied_page_comes_after_the_load_that_brings_it, ("page", "load")),
    (a_back_up_comes_after_the_forward_that_computed_it, ("back_up", "compute")),
    (a_back_up_comes_after_a_forward_in_another_stream, ("back_up", "graph")),
    (attention_comes_after_the_load, ("compute", "load")),
    (attention_comes_after_the_copied_page, ("compute", "page")),
]


# ---------------------------------------------------------------- more of what must hold


def nothing_is_over_before_its_last_byte_is_there(bench: Bench) -> bool:
    bench.transfer.load(OP, slots(0), slots(3))
    bench.gpu.step("compute", 2)
    for _ in range(20):
        if bench.transfer.drain():
            return is_all(bench.device.pages[3], 100)
        bench.gpu.step("load", 1)
    return False


def attention_comes_after_a_load_of_many_parts(bench: Bench) -> bool:
    bench = Bench(num_pages=700, transfer_type=type(bench.transfer))
    seen: list[Tensor] = []
    odd = array("i", range(1, 700, 2))
    bench.transfer.load(OP, odd, odd)
    bench.transfer.wait(OP, 0)
    bench.gpu.launch("forward", lambda: seen.append(bench.device.pages[699, 0].clone()))
    bench.gpu.run("compute")
    return is_all(seen[0], 100 + 699)


SCENES: list[Callable[[Bench], bool]] = [
    nothing_is_over_before_its_last_byte_is_there,
    attention_comes_after_a_load_of_many_parts,
]
