"""Free slots as runs."""

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.allocator import SlotAllocator
from hicache.errors import ConfigError


def test_fresh_slots_come_in_one_ascending_run() -> None:
    assert SlotAllocator(10).allocate(4) == array("i", [0, 1, 2, 3])


def test_more_than_is_free_takes_nothing() -> None:
    allocator = SlotAllocator(3)

    assert allocator.allocate(4) is None
    assert allocator.num_free == 3


def test_no_slots_can_be_asked_for_and_freed() -> None:
    allocator = SlotAllocator(0)

    slots = allocator.allocate(0)

    assert slots is not None
    assert not slots
    allocator.free(slots)
    allocator.check()


def test_a_pool_of_fewer_than_no_slots_is_an_error() -> None:
    with pytest.raises(ConfigError):
        SlotAllocator(-1)


def test_a_run_that_is_long_enough_is_preferred_to_pieces() -> None:
    allocator = SlotAllocator(100)
    allocator.allocate(100)
    allocator.free([1, 3, 5, 7, *range(40, 60), *range(80, 84)])

    assert allocator.allocate(4) == array("i", range(80, 84))
    assert allocator.allocate(16) == array("i", range(40, 56))


def test_pieces_are_used_when_no_run_is_long_enough() -> None:
    allocator = SlotAllocator(10)
    allocator.allocate(10)
    allocator.free([0, 2, 3, 4, 6, 8])

    slots = allocator.allocate(6)

    assert slots is not None
    assert sorted(slots) == [0, 2, 3, 4, 6, 8]
    assert slots[:3] == array("i", [2, 3, 4])


def test_neighbours_freed_in_any_order_become_one_run() -> None:
    allocator = SlotAllocator(8)
    allocator.allocate(8)

    for slot in (3, 1, 0, 2, 7, 4, 6, 5):
        allocator.free([slot])
        allocator.check()

    assert allocator.allocate(8) == array("i", range(8))


@pytest.mark.parametrize("slots", [[1], [0, 1], [5, 5], [4, 3, 2, 1]])
def test_freeing_twice_is_a_bug(slots: list[int]) -> None:
    allocator = SlotAllocator(8)
    allocator.allocate(8)
    allocator.free([1])

    with pytest.raises(AssertionError, match="twice"):
        allocator.free(slots)


@pytest.mark.parametrize("slot", [-1, 8])
def test_freeing_what_is_no_slot_is_a_bug(slot: int) -> None:
    allocator = SlotAllocator(8)
    allocator.allocate(8)

    with pytest.raises(AssertionError, match="no such"):
        allocator.free([slot])


def test_slots_share_no_memory_with_the_allocator() -> None:
    allocator = SlotAllocator(1000)

    slots = allocator.allocate(2)

    assert slots is not None
    slots[0] = 999
    allocator.check()
    assert 999 in (allocator.allocate(998) or [])


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against a set of free slots and a list of who has which."""

    NUM_SLOTS = 40

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(self.NUM_SLOTS)
        self.free = set(range(self.NUM_SLOTS))
        self.taken: list[int] = []

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        slots = self.allocator.allocate(count)

        if count > len(self.free):
            assert slots is None
            return
        assert slots is not None
        assert len(slots) == len(set(slots)) == count
        assert set(slots) <= self.free
        self.free -= set(slots)
        self.taken += slots

    @precondition(lambda self: bool(self.taken))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.taken), unique=True))

        self.allocator.free(slots)

        self.free |= set(slots)
        self.taken = [slot for slot in self.taken if slot not in self.free]

    @precondition(lambda self: bool(self.free))
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.free)))

        with pytest.raises(AssertionError):
            self.allocator.free([slot])

    @invariant()
    def holds(self) -> None:
        self.allocator.check()
        assert self.allocator.num_free == len(self.free)


TestAllocator = AllocatorMachine.TestCase
