"""Small pages by way of a buffer: which go there, and whether they arrive where they belong."""

import importlib.util
import os
import subprocess
import sys
from array import array

import pytest
import torch

from hicache.events import Finished, OpId
from hicache.layout import KVLayout
from hicache.pools import DevicePool, HostPool
from hicache.transfer import CudaTransfer
from hicache.transfer.runs import Run
from hicache.transfer.staging import Stretch, scatter_with_torch, stretches, warm_up
from tests.fake_streams import FakeGpu
from tests.test_pools import FakeRegistrar

SCATTERED = [Run(0, 9, 1), Run(1, 3, 2), Run(3, 7, 1), Run(4, 0, 1)]
KIB = 1024


def test_short_runs_of_host_neighbours_are_one_stretch() -> None:
    found = list(stretches(SCATTERED, 64 * KIB, 1 << 20, 0))

    assert found == [Stretch(0, [9, 3, 4, 7, 0])]


def test_long_runs_few_runs_and_strangers_stay_as_they_are() -> None:
    apart = [Run(2 * number, number, 1) for number in range(6)]

    assert list(stretches(SCATTERED, 512 * KIB, 1 << 30, 0)) == SCATTERED
    assert list(stretches(SCATTERED[:3], 64 * KIB, 1 << 20, 0)) == SCATTERED[:3]
    assert list(stretches(apart, 64 * KIB, 1 << 20, 0)) == apart


def test_a_stretch_fits_the_buffer_and_stays_in_its_chunk() -> None:
    many = [Run(number, 99 - number, 1) for number in range(20)]

    by_buffer = list(stretches(many, KIB, 8 * KIB, 0))
    by_chunk = list(stretches(many, KIB, 1 << 20, 10))

    assert [len(item.targets) for item in by_buffer if isinstance(item, Stretch)] == [8, 8, 4]
    assert [item.source for item in by_chunk] == [0, 10]


@pytest.mark.parametrize("num_layer_groups", [1, 2, 4])
def test_pages_arrive_by_way_of_the_buffer(num_layer_groups: int) -> None:
    layout = KVLayout(4, 1, 4, "float32", 2)
    device = DevicePool(layout, 64)
    host = HostPool(layout, 64, FakeRegistrar())
    host.pages.view(torch.int32).random_()
    transfer = CudaTransfer(
        device, host, gpu := FakeGpu(), num_layer_groups, staging_nbytes=9 * layout.page_nbytes
    )
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))

    transfer.load(OpId(1), array("i", range(64)), array("i", order.tolist()))
    gpu.run("load")

    assert sum(gpu.stretches) > 64 * num_layer_groups // 2
    assert max(gpu.stretches) <= 9 * num_layer_groups
    assert torch.equal(device.pages[order].view(torch.int32), host.pages.view(torch.int32))
    assert transfer.drain() == [Finished(OpId(1), [True] * 64)]


def test_back_ups_and_pages_of_l1_take_no_detour() -> None:
    layout = KVLayout(4, 1, 4, "float32", 2)
    device, host = DevicePool(layout, 64), HostPool(layout, 64, FakeRegistrar())
    transfer = CudaTransfer(device, host, gpu := FakeGpu(), staging_nbytes=64 * layout.page_nbytes)

    transfer.back_up(OpId(1), array("i", range(64)), array("i", range(63, -1, -1)))
    transfer.copy_page(OpId(2), "device", 3, 5)
    gpu.run()

    assert gpu.stretches == []


def test_scattered_rows_lie_in_their_slots_and_nowhere_else() -> None:
    target = torch.zeros(8, 12, dtype=torch.uint8)
    rows = torch.arange(1, 13, dtype=torch.uint8).view(3, 4)

    scatter_with_torch(target, rows, torch.tensor([5, 0, 7], dtype=torch.int32), 4)

    expected = torch.zeros(8, 12, dtype=torch.uint8)
    for row, slot in enumerate((5, 0, 7)):
        expected[slot, 4:8] = rows[row]
    assert torch.equal(target, expected)


def test_warming_up_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.transfer.staging.best_scatter", lambda: scatter_with_torch)

    warm_up(torch.device("cpu"))


KERNEL = """
import torch
from hicache.transfer.scatter import scatter
from hicache.transfer.staging import scatter_with_torch

random = torch.Generator().manual_seed(0)
SHAPES = [(3, 8, 24, 8), (5, 4, 12, 4), (7, 5, 11, 3), (4, 9000, 18000, 9000)]
for num_rows, width, pitch, first in SHAPES:
    rows = torch.randint(256, (num_rows, width), dtype=torch.uint8, generator=random)
    slots = torch.randperm(9, generator=random)[:num_rows].int()
    by_kernel, by_torch = torch.zeros(2, 9, pitch, dtype=torch.uint8)
    scatter(by_kernel, rows, slots, first)
    scatter_with_torch(by_torch, rows, slots, first)
    assert torch.equal(by_kernel, by_torch), (num_rows, width, pitch, first)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_interpreted_writes_what_torch_writes() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}

    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environ, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
