"""Copies on streams: every fence is there, and each is needed."""

from array import array
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from hicache.errors import TransferError
from hicache.events import Finished, OpId
from hicache.layout import KVLayout
from hicache.pools import CudaRegistrar, DevicePool, HostPool
from hicache.transfer import CudaTransfer, open_transfer
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
    ) -> None:
        self.gpu = FakeGpu(missing)
        self.device = DevicePool(LAYOUT, num_pages)
        self.host = HostPool(LAYOUT, num_pages, FakeRegistrar(), chunk_nbytes=1)
        for slot in range(num_pages):
            self.device.pages[slot] = slot
            self.host.pages[slot] = 100 + slot
        self.transfer = CudaTransfer(
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
    bench.gpu.run("load")
    return is_all(bench.device.pages[5], -1)


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

    for layer in range(LAYOUT.num_layers):
        bench.transfer.wait(OP, layer)
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
    (a_copied_page_comes_after_the_forward_that_computed_it, ("load", "compute")),
    (a_back_up_comes_after_the_forward_that_computed_it, ("back_up", "compute")),
    (a_back_up_comes_after_a_forward_in_another_stream, ("back_up", "graph")),
    (attention_comes_after_the_load, ("compute", "load")),
    (attention_comes_after_the_copied_page, ("compute", "load")),
]
NAMES = [scenario.__name__ for scenario, _ in SCENARIOS]


@pytest.mark.parametrize("scenario", [scenario for scenario, _ in SCENARIOS], ids=NAMES)
def test_bytes_are_right_at_any_speed_of_the_streams(scenario: Callable[[Bench], bool]) -> None:
    bench = Bench()

    assert scenario(bench)
    assert bench.gpu.num_synchronized == 0, "the step was held up"


@pytest.mark.parametrize(("scenario", "fence"), SCENARIOS, ids=NAMES)
def test_bytes_are_wrong_without_the_fence(scenario: Callable[[Bench], bool], fence: Fence) -> None:
    """Else the test above would prove nothing."""
    assert not scenario(Bench(missing=frozenset([fence])))


# ---------------------------------------------------------------- order and overlap


def test_a_page_is_copied_after_the_load_that_brings_it() -> None:
    bench = Bench()

    bench.transfer.load(OpId(1), slots(0), slots(3))
    bench.transfer.copy_page(OpId(2), "device", 3, 5)
    bench.gpu.run("load")

    assert is_all(bench.device.pages[5], 100)


def test_first_layers_can_be_read_while_others_still_arrive() -> None:
    bench = Bench(num_layer_groups=4)
    seen: list[Tensor] = []

    bench.transfer.load(OP, slots(0, 2), slots(3, 5))
    bench.transfer.wait(OP, 0)
    bench.read(3, seen)
    bench.gpu.run("compute")

    assert is_all(seen[0][0], 100)
    assert is_all(seen[0][1:], 3)
    assert bench.gpu.log[:3] == ["load", "load", "forward"]


def test_waiting_for_what_is_unknown_or_over_costs_nothing() -> None:
    bench = Bench()
    bench.transfer.load(OP, slots(0), slots(3))
    bench.gpu.run()
    bench.transfer.drain()

    bench.transfer.wait(OP, 0)
    bench.transfer.wait(OpId(99), 3)

    assert not bench.gpu.streams["compute"].work


def test_nothing_is_over_before_its_last_byte_is_there() -> None:
    bench = Bench(num_layer_groups=2)
    bench.transfer.load(OpId(1), slots(0), slots(3))
    bench.transfer.back_up(OpId(2), slots(4), slots(4))

    before = bench.transfer.drain()
    bench.gpu.run()
    after = bench.transfer.drain()

    assert before == []
    assert after == [Finished(OpId(1), [True]), Finished(OpId(2), [True])]
    assert bench.transfer.drain() == []


def test_half_a_load_is_not_over() -> None:
    bench = Bench(num_layer_groups=2)
    bench.transfer.load(OP, slots(0), slots(3))
    bench.gpu.step("compute", 2)
    bench.gpu.step("load", 2 + 2)

    assert is_all(bench.device.pages[3, :2], 100)
    assert bench.transfer.drain() == []


@pytest.mark.parametrize("num_layer_groups", [1, 2, 3, 4])
def test_all_layers_arrive_whatever_the_groups(num_layer_groups: int) -> None:
    bench = Bench(num_layer_groups=num_layer_groups)

    bench.transfer.load(OP, slots(0, 1, 2, 7), slots(4, 5, 6, 0))
    bench.gpu.run()

    assert bench.device.pages[:, 0, 0, 0, 0, 0].tolist() == [107, 1, 2, 3, 100, 101, 102, 7]
    assert all(is_all(page, float(page.flatten()[0])) for page in bench.device.pages)


def test_slots_are_read_when_asked_for() -> None:
    bench = Bench(num_pages=1400)
    odd = array("i", range(1, 1400, 2))
    source, target = slots(0), slots(2)

    bench.transfer.back_up(OpId(1), odd, odd)  # fills the stream
    bench.transfer.back_up(OpId(2), source, target)
    source[0] = target[0] = 7
    bench.transfer.close()

    assert is_all(bench.host.pages[2], 0)


def test_small_pages_are_not_cut_by_layer() -> None:
    assert Bench(num_layer_groups=None).transfer.num_layer_groups == 1


def test_no_copy_crosses_from_one_pinned_chunk_into_the_next() -> None:
    copied: list[tuple[int, int]] = []

    class Watching(FakeGpu):
        def copy(self, targets: object, sources: object) -> None:
            assert isinstance(targets, list)
            assert isinstance(sources, list)
            copied.extend((t.data_ptr(), t.nbytes) for t in [*targets, *sources])
            super().copy(targets, sources)

    layout = KVLayout(2, 1, 256, "float32", 2)  # 8,192 bytes a page
    device = DevicePool(layout, 16)
    host = HostPool(layout, 16, FakeRegistrar(), chunk_nbytes=3 * 8192)
    transfer = CudaTransfer(device, host, gpu := Watching(), num_layer_groups=1)

    transfer.load(OpId(1), array("i", range(16)), array("i", range(16)))
    transfer.back_up(OpId(2), array("i", range(16)), array("i", range(16)))
    gpu.run()

    start, end = host.pages.data_ptr(), host.pages.data_ptr() + host.pages.nbytes
    inside = [(at - start, nbytes) for at, nbytes in copied if start <= at < end]
    assert len(inside) == 12
    assert all(at // 24576 == (at + nbytes - 1) // 24576 for at, nbytes in inside)


# ---------------------------------------------------------------- failures


def test_a_load_says_how_long_the_stream_took() -> None:
    bench = Bench(num_layer_groups=2)

    bench.transfer.load(OP, slots(0, 2), slots(3, 5))
    bench.gpu.run()

    (finished,) = bench.transfer.drain()
    assert finished.seconds == 0.001


def test_a_copy_that_cannot_be_started_fails_once_its_part_is_over() -> None:
    bench = Bench(num_layer_groups=2)
    bench.gpu.copies_until_failure = 3

    bench.transfer.load(OP, slots(0, 2), slots(3, 5))
    early = bench.transfer.drain()
    bench.transfer.wait(OP, 3)
    bench.gpu.run()

    assert early == [], "the part that was started still writes to its slots"
    assert bench.transfer.drain() == [Finished(OP, [False, False])]


def test_copies_go_on_after_one_that_failed() -> None:
    bench = Bench()
    bench.gpu.copies_until_failure = 0
    bench.transfer.back_up(OpId(1), slots(0), slots(3))
    bench.gpu.copies_until_failure = None

    bench.transfer.back_up(OpId(2), slots(0), slots(4))
    bench.gpu.run()

    assert bench.transfer.drain() == [Finished(OpId(1), [False]), Finished(OpId(2), [True])]
    assert is_all(bench.host.pages[4], 0)


def test_a_gpu_that_fails_fails_its_copies() -> None:
    bench = Bench()
    bench.transfer.load(OP, slots(0, 1), slots(3, 4))
    bench.gpu.is_broken = True

    assert bench.transfer.drain() == [Finished(OP, [False, False])]


# ---------------------------------------------------------------- queues


def test_back_ups_wait_while_their_stream_is_full() -> None:
    bench = Bench(num_pages=1400)
    odd = array("i", range(1, 1400, 2))
    bench.transfer.back_up(OpId(1), odd, odd)
    in_stream = len(bench.gpu.streams["back_up"].work)

    bench.transfer.back_up(OpId(2), slots(0), slots(2))
    waiting = len(bench.gpu.streams["back_up"].work)
    bench.gpu.run()
    first = bench.transfer.drain()
    bench.gpu.run()
    second = bench.transfer.drain()

    assert waiting == in_stream
    assert [finished.op for finished in first] == [1]
    assert [finished.op for finished in second] == [2]
    assert is_all(bench.host.pages[2], 0)


def test_a_back_up_that_finds_the_queue_full_fails_at_once() -> None:
    bench = Bench(max_waiting_pages=2)

    bench.transfer.back_up(OP, slots(0, 1, 2), slots(0, 1, 2))

    assert bench.transfer.drain() == [Finished(OP, [False] * 3)]
    assert bench.transfer.num_dropped == 1


def test_closing_waits_for_all_that_was_asked_for() -> None:
    bench = Bench(num_pages=1400)
    odd = array("i", range(1, 1400, 2))
    bench.transfer.back_up(OpId(1), odd, odd)
    bench.transfer.back_up(OpId(2), slots(0), slots(2))
    bench.transfer.load(OpId(3), slots(4), slots(4))

    bench.transfer.close()
    bench.transfer.close()

    assert is_all(bench.host.pages[2], 0)
    assert is_all(bench.device.pages[4], 104)
    assert sorted(finished.op for finished in bench.transfer.drain()) == [1, 2, 3]
    with pytest.raises(TransferError):
        bench.transfer.load(OpId(4), slots(0), slots(0))
    with pytest.raises(TransferError):
        bench.transfer.back_up(OpId(5), slots(0), slots(0))


def test_closing_ends_also_on_a_gpu_that_failed() -> None:
    bench = Bench(num_pages=1400)
    odd = array("i", range(1, 1400, 2))
    bench.transfer.back_up(OpId(1), odd, odd)
    bench.transfer.back_up(OpId(2), slots(0), slots(2))
    bench.gpu.is_broken = True

    bench.transfer.close()

    assert [any(finished.outcomes) for finished in bench.transfer.drain()] == [False, False]


@pytest.mark.gpu
def test_pages_come_back_from_a_real_gpu() -> None:
    layout = KVLayout(8, 2, 64, "bfloat16", 64)
    device = DevicePool(layout, 64, "cuda")
    host = HostPool(layout, 64, CudaRegistrar())
    device.pages.copy_(torch.randn(device.pages.shape, dtype=torch.bfloat16))
    expected = device.pages.cpu()
    transfer = open_transfer(device, host)
    there, back = array("i", torch.randperm(64).tolist()), array("i", torch.randperm(64).tolist())

    transfer.back_up(OpId(1), array("i", range(64)), there)
    torch.cuda.synchronize()
    device.pages.zero_()
    transfer.load(OpId(2), there, back)
    for layer in range(layout.num_layers):
        transfer.wait(OpId(2), layer)
    found = device.pages.cpu()
    transfer.close()
    host.close()

    assert torch.equal(found[back.tolist()].view(torch.uint8), expected.view(torch.uint8))
    assert [all(finished.outcomes) for finished in transfer.drain()] == [True, True]
