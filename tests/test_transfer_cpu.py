"""Copies in a thread."""

import logging
import os
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from random import Random

import pytest
import torch

from hicache.errors import TransferError
from hicache.events import Finished, OpId
from hicache.layout import ITEM_NBYTES, Kind, KVLayout
from hicache.pools import DevicePool, HostPool
from hicache.transfer import CpuTransfer, open_transfer

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", page_size=2)


class Opened:
    """Pools of marked pages and a transfer between them."""

    def __init__(self, layout: KVLayout = LAYOUT, num_pages: int = 16) -> None:
        self.wake = threading.Event()
        self.device = DevicePool(layout, num_pages)
        self.host = HostPool(layout, num_pages)
        mark(self.device.pages, 0)
        mark(self.host.pages, 100)
        self.transfer = CpuTransfer(self.device, self.host, self.wake)

    def finished(self, count: int) -> list[Finished]:
        """Return that many completions, once they are there."""
        found: list[Finished] = []
        while len(found) < count:
            assert self.wake.wait(30)
            self.wake.clear()
            found += self.transfer.drain()
        return found


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    opened.transfer.close()


def mark(pages: torch.Tensor, start: int) -> None:
    """Fill every page with bytes of its own."""
    for slot, page in enumerate(pages):
        page.view(torch.uint8).fill_((start + slot) % 256)


def marks(pages: torch.Tensor) -> list[int]:
    """Return the mark of every page, -1 for a page that is not all of one."""
    flat = pages.view(torch.uint8).flatten(1)
    return [int(page[0]) if bool(page.eq(page[0]).all()) else -1 for page in flat]


def slots(*numbers: int) -> "array[int]":
    return array("i", numbers)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", ITEM_NBYTES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_come_back_bit_by_bit_through_random_slots(
    dtype: str, page_size: int, kind: Kind
) -> None:
    layout = KVLayout(3, 1, 5, dtype, page_size, kind)
    device, host = DevicePool(layout, 40), HostPool(layout, 60)
    random = Random(page_size)
    device.pages.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(1))
    expected = device.pages.view(torch.uint8).clone()
    first, there, back = (
        array("i", random.sample(range(num_pages), 30)) for num_pages in (40, 60, 40)
    )

    transfer = open_transfer(device, host)
    transfer.back_up(OpId(1), first, there)
    transfer.wait(OpId(1), 0)
    device.pages.zero_()
    transfer.load(OpId(2), there, back)
    transfer.wait(OpId(2), layout.num_layers - 1)
    transfer.close()

    found = device.pages.view(torch.uint8)
    assert torch.equal(found[back.tolist()], expected[first.tolist()])
    assert int(found.flatten(1).any(dim=1).sum()) == 30, "no other slot was written"


def test_large_pages_and_long_runs_are_copied_whole() -> None:
    layout = KVLayout(8, 2, 64, "float32", 128)  # 1 MiB
    opened = Opened(layout, num_pages=80)

    opened.transfer.back_up(OpId(1), array("i", range(70)), array("i", range(10, 80)))
    opened.transfer.close()

    assert marks(opened.host.pages) == [*range(100, 110), *range(70)]


def test_a_page_is_copied_within_l1_after_the_load_that_brings_it(opened: Opened) -> None:
    opened.transfer.load(OpId(1), slots(1), slots(2))
    opened.transfer.copy_page(OpId(2), "device", 2, 3)
    opened.transfer.copy_page(OpId(3), "host", 7, 4)

    finished = opened.finished(3)

    assert [entry.op for entry in finished] == [1, 2, 3]
    assert marks(opened.device.pages)[:5] == [0, 1, 101, 101, 107]


def test_slots_are_read_when_asked_for(opened: Opened) -> None:
    source, target = slots(1, 2), slots(3, 4)

    opened.transfer.load(OpId(1), source, target)
    source[0] = target[1] = 9
    opened.finished(1)

    assert marks(opened.device.pages)[3:5] == [101, 102]


@pytest.mark.parametrize("wrong", [(16, 0), (-1, 0), (0, 16), (0, -1)])
def test_a_slot_that_is_none_is_a_bug(opened: Opened, wrong: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        opened.transfer.load(OpId(1), slots(wrong[0]), slots(wrong[1]))


# ---------------------------------------------------------------- completions


def test_every_page_has_an_outcome(opened: Opened) -> None:
    opened.transfer.load(OpId(1), slots(1, 2, 5), slots(0, 1, 2))
    opened.transfer.back_up(OpId(2), slots(), slots())

    finished = opened.finished(2)

    assert {entry.op: entry.outcomes for entry in finished} == {1: [True] * 3, 2: []}
    assert opened.transfer.drain() == []


def test_waiting_for_what_is_unknown_or_over_returns_at_once(opened: Opened) -> None:
    opened.transfer.load(OpId(1), slots(1), slots(2))
    opened.finished(1)

    opened.transfer.wait(OpId(1), 0)
    opened.transfer.wait(OpId(77), 1)
    opened.transfer.fence()


class Gate:
    """Holds the thread of copies back: it waits where a completion is announced."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.may_pass = threading.Event()

    def set(self) -> None:
        self.is_reached.set()
        self.may_pass.wait(30)


def test_loads_pass_back_ups_that_wait() -> None:
    gate = Gate()
    transfer = CpuTransfer(DevicePool(LAYOUT, 4), HostPool(LAYOUT, 4), gate)
    transfer.back_up(OpId(1), slots(0), slots(0))
    gate.is_reached.wait(30)

    transfer.back_up(OpId(2), slots(1), slots(1))
    transfer.load(OpId(3), slots(2), slots(2))
    transfer.load(OpId(4), slots(3), slots(3))
    gate.may_pass.set()
    transfer.close()

    assert [entry.op for entry in transfer.drain()] == [1, 3, 4, 2]


def test_a_back_up_that_finds_the_queue_full_fails_at_once() -> None:
    gate = Gate()
    device, host = DevicePool(LAYOUT, 8), HostPool(LAYOUT, 8)
    transfer = CpuTransfer(device, host, gate, max_waiting_pages=3)
    transfer.back_up(OpId(1), slots(0), slots(0))
    gate.is_reached.wait(30)
    gate.may_pass.set()

    transfer.back_up(OpId(2), slots(1, 2, 3, 4), slots(1, 2, 3, 4))
    transfer.back_up(OpId(3), slots(1, 2, 3), slots(1, 2, 3))
    transfer.close()

    outcomes = {entry.op: entry.outcomes for entry in transfer.drain()}
    assert outcomes == {1: [True], 2: [False] * 4, 3: [True] * 3}
    assert transfer.num_dropped == 1


def test_closing_does_what_was_asked_for_first() -> None:
    opened = Opened()
    opened.transfer.back_up(OpId(1), slots(1, 2), slots(3, 4))
    opened.transfer.load(OpId(2), slots(1, 2), slots(5, 6))

    opened.transfer.close()
    opened.transfer.close()

    assert sorted(entry.op for entry in opened.transfer.drain()) == [1, 2]
    with pytest.raises(TransferError):
        opened.transfer.load(OpId(3), slots(0), slots(0))


def test_copies_start_no_threads_of_torch() -> None:
    layout = KVLayout(8, 2, 64, "float32", 128)  # 1 MiB, which torch would share among threads
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        opened = Opened(layout, num_pages=8)
        before = len(os.listdir("/proc/self/task"))

        opened.transfer.back_up(OpId(1), array("i", range(8)), array("i", range(8)))
        opened.finished(1)
        after = len(os.listdir("/proc/self/task"))
        opened.transfer.close()

        assert after == before
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(num_threads)


# ---------------------------------------------------------------- failures


class HalfPool:
    """A pool whose pages are half as large as its layout says: copies with it raise."""

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        self.layout = layout
        self.pages = torch.zeros(num_pages, layout.page_nbytes // 8)


def test_a_copy_that_raises_fails_all_its_pages_and_the_thread_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wake = threading.Event()
    device = DevicePool(LAYOUT, 4)
    mark(device.pages, 50)
    transfer = CpuTransfer(device, HalfPool(LAYOUT, 4), wake)

    with caplog.at_level(logging.ERROR, "hicache.transfer"):
        transfer.back_up(OpId(1), slots(0, 1), slots(0, 1))
        transfer.wait(OpId(1), 0)
    transfer.copy_page(OpId(2), "device", 0, 3)
    transfer.close()

    assert transfer.drain() == [Finished(OpId(1), [False, False]), Finished(OpId(2), [True])]
    assert marks(device.pages)[3] == 50
    assert "a copy of 2 pages failed" in caplog.text


def test_a_copy_says_how_long_it_took_however_late_that_is_heard() -> None:
    device = DevicePool(LAYOUT, 4)
    transfer = CpuTransfer(device, HostPool(LAYOUT, 4))
    asked = time.monotonic()
    transfer.load(OpId(1), slots(0, 1), slots(0, 1))
    transfer.wait(OpId(1), 0)
    arrived = time.monotonic()

    transfer.close()
    (finished,) = transfer.drain()

    assert finished.seconds is not None
    assert 0 < finished.seconds <= arrived - asked


# ---------------------------------------------------------------- many at once


def test_many_operations_give_what_one_after_the_other_would() -> None:
    """Each operation has slots to itself, as those who hold their pages see to."""
    random = Random(7)
    opened = Opened(num_pages=60)
    order = random.sample(range(60), 60)
    device, host = marks(opened.device.pages), marks(opened.host.pages)

    for number, chunk in enumerate(chunks(order, 6)):
        source, target = array("i", chunk[:3]), array("i", chunk[3:])
        if number % 2:
            opened.transfer.load(OpId(number), source, target)
            for from_slot, to_slot in zip(source, target, strict=True):
                device[to_slot] = host[from_slot]
        else:
            opened.transfer.back_up(OpId(number), source, target)
            for from_slot, to_slot in zip(source, target, strict=True):
                host[to_slot] = device[from_slot]
    opened.transfer.close()

    assert marks(opened.device.pages) == device
    assert marks(opened.host.pages) == host
    assert len(opened.transfer.drain()) == 10


def chunks(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]
