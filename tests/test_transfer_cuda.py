"""Copies on streams: in which order, in which pieces, and what comes of failures."""

from array import array
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hicache.errors import TransferError
from hicache.events import Finished, OpId
from hicache.layout import KVLayout
from hicache.pools import CudaRegistrar, DevicePool, HostPool
from hicache.transfer import CudaTransfer, open_transfer
from hicache.transfer.cuda import count_layer_groups
from hicache.transfer.runs import Run
from tests.fake_streams import FakeGpu
from tests.test_pools import FakeRegistrar
from tests.transfer_scenes import OP, Bench, is_all, slots

# ---------------------------------------------------------------- order and overlap


def test_a_copied_page_does_not_wait_for_loads_that_do_not_bring_it() -> None:
    bench = Bench(num_layer_groups=4)
    bench.transfer.load(OpId(1), slots(0, 2), slots(3, 5))

    bench.transfer.copy_page(OpId(2), "host", 1, 6)
    bench.transfer.copy_page(OpId(3), "device", 1, 7)
    bench.gpu.run("compute", "page")

    assert bench.gpu.log[:2] == ["page", "page"]
    assert is_all(bench.device.pages[6], 101)
    assert is_all(bench.device.pages[7], 1)


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


def test_a_wait_tells_which_layers_it_covers() -> None:
    bench = Bench(num_layer_groups=2)
    bench.transfer.load(OpId(1), slots(0, 2), slots(3, 5))
    bench.transfer.copy_page(OpId(2), "host", 1, 6)

    assert [bench.transfer.wait(OpId(1), layer) for layer in range(4)] == [2, 2, 4, 4]
    assert bench.transfer.wait(OpId(2), 0) == 4
    assert bench.transfer.wait(OpId(3), 0) == 4, "nothing is on its way"


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
    copied: list[Run] = []

    class Watching(FakeGpu):
        def copy(self, target: Tensor, source: Tensor, chosen: Sequence[Run], part: slice) -> None:
            copied.extend(chosen)
            super().copy(target, source, chosen, part)

    layout = KVLayout(2, 1, 256, "float32", 2)  # 8,192 bytes a page
    device = DevicePool(layout, 16)
    host = HostPool(layout, 16, FakeRegistrar(), chunk_nbytes=3 * 8192)
    transfer = CudaTransfer(device, host, gpu := Watching(), num_layer_groups=2)

    transfer.load(OpId(1), array("i", range(16)), array("i", range(16)))
    transfer.back_up(OpId(2), array("i", range(16)), array("i", range(16)))
    gpu.run()

    assert len(copied) == 3 * 6
    assert all(at // 3 == (at + length - 1) // 3 for at, _, length in copied)


def test_neighbouring_pages_are_one_copy_a_layer_group() -> None:
    bench = Bench(num_layer_groups=2)

    bench.transfer.load(OP, slots(0, 1, 2, 7), slots(4, 5, 6, 0))

    assert bench.gpu.launches == [[3, 1], [3, 1]]


def test_parts_of_pages_are_copied_one_by_one_where_rows_cannot_be() -> None:
    bench = Bench(num_layer_groups=2)
    bench.gpu.copies_rows = False

    bench.transfer.load(OP, slots(0, 1, 2, 7), slots(4, 5, 6, 0))
    bench.transfer.back_up(OpId(2), slots(1, 2), slots(1, 2))
    bench.gpu.run()

    assert bench.gpu.launches == [[1, 1, 1, 1], [1, 1, 1, 1], [2]]
    assert bench.device.pages[:, 0, 0, 0, 0, 0].tolist() == [107, 1, 2, 3, 100, 101, 102, 7]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (KVLayout(32, 8, 128, "bfloat16", 64), 8),  # 8 MiB a page: an 8B Llama
        (KVLayout(32, 8, 128, "bfloat16", 16), 4),
        (KVLayout(30, 3, 64, "bfloat16", 16), 1),
        (KVLayout(2, 8, 128, "bfloat16", 4096), 2),
    ],
)
def test_layer_groups_are_many_but_not_small(layout: KVLayout, expected: int) -> None:
    assert count_layer_groups(layout) == expected


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


def test_what_a_broken_gpu_cannot_be_given_fails_and_raises_nothing() -> None:
    bench = Bench()
    bench.gpu.is_broken = True

    bench.transfer.load(OpId(1), slots(0, 1), slots(3, 4))
    bench.transfer.back_up(OpId(2), slots(5), slots(5))
    bench.transfer.wait(OpId(1), 0)

    assert bench.transfer.drain() == [Finished(OpId(1), [False] * 2), Finished(OpId(2), [False])]


def test_a_gpu_that_breaks_between_two_parts_fails_the_whole_copy() -> None:
    bench = Bench(num_pages=1400)
    odd = array("i", range(1, 1400, 2))
    bench.transfer.load(OP, odd, odd)  # more than the stream takes at once
    bench.gpu.is_broken = True

    bench.transfer.wait(OP, 3)

    assert bench.transfer.drain() == [Finished(OP, [False] * 700)]


# ---------------------------------------------------------------- queues


def test_a_load_is_put_as_far_as_there_is_room_and_then_for_whom_it_is_waited() -> None:
    bench = Bench(num_pages=1400, num_layer_groups=2)
    odd = array("i", range(1, 1400, 2))

    bench.transfer.load(OP, odd, odd)
    at_once = sum(map(len, bench.gpu.launches))
    bench.transfer.wait(OP, 1)
    first_group = sum(map(len, bench.gpu.launches))
    bench.transfer.wait(OP, 2)
    both = sum(map(len, bench.gpu.launches))
    bench.gpu.run()

    assert (at_once, first_group, both) == (512, 700, 1400)
    assert bench.transfer.drain() == [Finished(OP, [True] * 700)]
    assert bench.gpu.num_synchronized == 0


def test_a_load_that_nobody_waits_for_goes_on_as_the_stream_has_room() -> None:
    bench = Bench(num_pages=1400, num_layer_groups=2)
    odd = array("i", range(1, 1400, 2))
    bench.transfer.load(OP, odd, odd)
    bench.transfer.copy_page(OpId(2), "device", 699, 0)  # which the load brings

    finished: list[Finished] = []
    for _ in range(4):
        bench.gpu.run()
        finished += bench.transfer.drain()

    assert [ended.op for ended in finished] == [OP, 2]
    assert is_all(bench.device.pages[0], 100 + 699)


def test_back_ups_wait_while_their_stream_is_full() -> None:
    bench = Bench(num_pages=1400)
    odd = array("i", range(1, 1400, 2))
    bench.transfer.back_up(OpId(1), odd, odd)
    in_stream = len(bench.gpu.streams["back_up"].work)

    bench.transfer.back_up(OpId(2), slots(0), slots(2))
    waiting = len(bench.gpu.streams["back_up"].work)
    finished = []
    for _ in range(3):
        bench.gpu.run()
        finished.append([ended.op for ended in bench.transfer.drain()])

    assert waiting == in_stream
    assert finished == [[], [1, 2], []]
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
@pytest.mark.parametrize("staging_nbytes", [0, 1 << 20])
@pytest.mark.parametrize("page_size", [16, 1024])
def test_pages_come_back_from_a_real_gpu(page_size: int, staging_nbytes: int) -> None:
    layout = KVLayout(8, 2, 64, "bfloat16", page_size)
    device = DevicePool(layout, 64, "cuda")
    host = HostPool(layout, 64, CudaRegistrar())
    device.pages.copy_(torch.randn(device.pages.shape, dtype=torch.bfloat16))
    expected = device.pages.cpu()
    transfer = open_transfer(device, host, staging_nbytes=staging_nbytes)
    order = torch.arange(64) if staging_nbytes else torch.randperm(64)
    there, back = array("i", order.tolist()), array("i", torch.randperm(64).tolist())

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
