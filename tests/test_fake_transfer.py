"""The transfer that tests complete by hand."""

from array import array

import pytest

from hicache.events import Finished, OpId
from hicache.layout import KVLayout
from hicache.pools import DevicePool, HostPool
from hicache.testing.transfers import FakeTransfer, PendingCopy

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", page_size=2)


@pytest.fixture
def device() -> DevicePool:
    pool = DevicePool(LAYOUT, 4)
    for slot in range(4):
        pool.pages[slot] = slot
    return pool


@pytest.fixture
def host() -> HostPool:
    pool = HostPool(LAYOUT, 4)
    for slot in range(4):
        pool.pages[slot] = 10 + slot
    return pool


@pytest.fixture
def transfer(device: DevicePool, host: HostPool) -> FakeTransfer:
    return FakeTransfer(device, host)


def marks(pool: DevicePool | HostPool) -> list[float]:
    return [float(page.flatten()[0]) for page in pool.pages]


def test_nothing_moves_before_it_is_completed(
    transfer: FakeTransfer, device: DevicePool, host: HostPool
) -> None:
    transfer.load(OpId(1), array("i", [0, 1]), array("i", [2, 3]))
    before = marks(device)
    finished_before = transfer.drain()

    host.pages[1] = 77
    transfer.complete(OpId(1))

    assert (before, len(finished_before)) == ([0, 1, 2, 3], 0)
    assert marks(device) == [0, 1, 10, 77]
    assert transfer.drain() == [Finished(OpId(1), [True, True])]
    assert transfer.drain() == []


def test_copies_end_in_the_order_of_the_test(transfer: FakeTransfer, host: HostPool) -> None:
    transfer.back_up(OpId(1), array("i", [0]), array("i", [3]))
    transfer.back_up(OpId(2), array("i", [1]), array("i", [2]))

    transfer.complete(OpId(2))
    transfer.complete(OpId(1))

    assert [entry.op for entry in transfer.drain()] == [2, 1]
    assert marks(host) == [10, 11, 1, 0]


def test_a_copy_can_fail_in_whole_or_in_part(transfer: FakeTransfer, device: DevicePool) -> None:
    transfer.load(OpId(1), array("i", [0, 1]), array("i", [0, 1]))
    transfer.load(OpId(2), array("i", [2, 3]), array("i", [2, 3]))

    transfer.fail(OpId(1))
    transfer.complete(OpId(2), [True, False])

    assert marks(device) == [0, 1, 12, 3]
    assert transfer.drain() == [
        Finished(OpId(1), [False, False]),
        Finished(OpId(2), [True, False]),
    ]


def test_a_page_is_copied_from_either_tier(transfer: FakeTransfer, device: DevicePool) -> None:
    transfer.copy_page(OpId(1), "device", 1, 0)
    transfer.copy_page(OpId(2), "host", 1, 3)

    assert transfer.pending[OpId(2)] == PendingCopy(OpId(2), "host", (1,), "device", (3,))
    transfer.complete_all()
    assert marks(device) == [1, 1, 2, 11]


def test_waiting_completes_what_is_pending(transfer: FakeTransfer, device: DevicePool) -> None:
    transfer.load(OpId(1), array("i", [0]), array("i", [0]))

    transfer.wait(OpId(1), 1)
    transfer.wait(OpId(9), 0)

    assert marks(device)[0] == 10
    assert transfer.waited == [(1, 1), (9, 0)]


def test_closing_completes_what_is_pending(transfer: FakeTransfer, device: DevicePool) -> None:
    transfer.load(OpId(1), array("i", [0]), array("i", [0]))
    transfer.fence()

    transfer.close()

    assert marks(device)[0] == 10
    assert transfer.num_fences == 1
    with pytest.raises(AssertionError, match="after close"):
        transfer.load(OpId(2), array("i"), array("i"))
