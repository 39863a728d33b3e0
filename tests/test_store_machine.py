"""The store over a backend that fails at random, against a model too simple to be wrong: a dict.

The model says what may be in storage; the pool is checked against what each slot is allowed to
hold. Which calls hang, and when they return, is decided by the machine; what the threads make of
it in the meantime is not, so no choice may depend on it.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache.codec import header_nbytes
from hicache.events import Finished, OpId, Probed, Returned, StorageDown, StorageUp
from hicache.keys import PageRef
from hicache.testing.faulty import Chances, Fault, Gate
from tests.stores import (
    PAGE_NBYTES,
    PAGE_SIZE,
    WAIT_S,
    World,
    namespace,
    page_refs,
    repetitive,
    slots,
)

NUM_PAGES = 96
TENANT = namespace().salted("tenant")
NAMESPACE = TENANT.digest
PAGES = [
    page
    for first in range(0, 3000, 1000)
    for page in page_refs(4, first_token=first, namespace=NAMESPACE)
]
MAX_RECORDS = 7
"""That the tenant may have."""
RECORD_NBYTES = header_nbytes(PAGE_SIZE) + PAGE_NBYTES
SOME_PAGES = st.lists(st.sampled_from(PAGES), min_size=0, max_size=6, unique_by=lambda p: p.key)
MARK = b"\xa5" * PAGE_NBYTES


class StoreMachine(RuleBasedStateMachine):
    """Slots are free (and then hold the mark), or belong to one operation that is not over."""

    storage: ClassVar[dict[str, object]] = {}
    """Settings beside those that all have."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            num_pages=NUM_PAGES,
            config={
                "breaker_failures": 2, "queue_pages": 18, "concurrency": 2,
                "tenants": {"tenant": {"max_size": f"{MAX_RECORDS * RECORD_NBYTES}B"}},
                "max_written_per_day": f"{200 * RECORD_NBYTES}B",
                **self.storage,
            },
            content=repetitive,
            item_nbytes=4,
        )  # fmt: skip
        self.world.store.start()
        self.world.store.describe(TENANT)
        self.free = set(range(NUM_PAGES))
        self.lent: dict[OpId, tuple[list[int], Sequence[PageRef], str]] = {}
        self.overdue: set[OpId] = set()
        self.probes: dict[OpId, int] = {}
        self.accepted: set[bytes] = set()
        """Keys of pages that may be in storage: an outcome True of a fetch needs one."""
        self.gates: list[Gate] = []
        self.is_up = True
        for slot in self.free:
            self.mark(slot)

    # ------------------------------------------------------------ what the engine does

    @rule(pages=SOME_PAGES)
    def store(self, pages: list[PageRef]) -> None:
        if taken := self.take(len(pages)):
            self.world.fill(pages, taken)
        op = self.begin(taken, pages, "store")
        self.accepted.update(page.key for page in pages)
        self.world.store.store(op, NAMESPACE, pages, slots(*taken))

    @rule(pages=SOME_PAGES)
    def fetch(self, pages: list[PageRef]) -> None:
        taken = self.take(len(pages))
        op = self.begin(taken, pages, "fetch")
        self.world.store.fetch(op, NAMESPACE, pages, slots(*taken))

    @rule(pages=SOME_PAGES)
    def probe(self, pages: list[PageRef]) -> None:
        op = self.world.new_op()
        self.probes[op] = len(pages)
        self.world.store.probe(op, NAMESPACE, [page.key for page in pages])

    @rule(page=st.sampled_from(PAGES))
    def delete(self, page: PageRef) -> None:
        self.world.store.delete([page.key])

    @rule(pages=SOME_PAGES)
    def store_and_fetch(self, pages: list[PageRef]) -> None:
        self.store(pages)
        self.breathe()
        self.fetch(pages)
        self.world.store.touch([page.key for page in pages])

    @rule(back=st.integers(0, 5))
    def cancel(self, back: int) -> None:
        self.world.store.cancel(OpId(self.world.last_op - back))

    # ------------------------------------------------------------ what the world does

    @initialize(record=st.sampled_from([0.5, 0.2, 0.0]), call=st.sampled_from([0.1, 0.4, 0.0]))
    def weather(self, record: float, call: float) -> None:
        self.world.backend.chances = Chances(
            error=call / 2, full=call / 4, short=call / 4,
            lost=record / 4, truncated=record / 4, flipped=record / 2,
        )  # fmt: skip

    @rule()
    def breathe(self) -> None:
        """Give the loop some time, so that not everything happens at once."""
        for _ in range(300):
            if not self.lent:
                break
            self.world.store.pump()
            time.sleep(0)
            self.drain()

    @rule(method=st.sampled_from(["get", "put", "contains"]), is_late=st.booleans())
    def hang(self, method: str, is_late: bool) -> None:
        gate = Gate()
        self.gates.append(gate)
        fault = Fault(
            before=gate if is_late else None, after=None if is_late else gate, ignores_cancel=True
        )
        self.world.backend.next(method, fault)  # type: ignore[arg-type]

    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        if self.gates:
            self.gates.pop(number % len(self.gates)).open()

    @rule(seconds=st.sampled_from([0.05, 0.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def settle(self) -> None:
        """Let everything end."""
        self.world.backend.heal()
        for gate in self.gates:
            gate.open()
        self.gates.clear()
        self.world.wait_until(self.is_idle)
        there = asyncio.run(self.world.inner.contains([page.key for page in PAGES]))
        is_known = not self.storage  # coded records are shorter, and may have other names
        assert not is_known or sum(there) <= MAX_RECORDS, "the tenant has more than its share"

    def is_idle(self) -> bool:
        self.world.advance(0.5)
        self.drain()
        return self.is_up and not self.lent and not self.probes

    # ------------------------------------------------------------ what must hold

    @invariant()
    def drain(self) -> None:
        for event in self.world.store.drain():
            match event:
                case Finished(op, outcomes, is_returned):
                    self.end(op, list(outcomes), is_returned=is_returned)
                case Returned(op):
                    assert op in self.overdue
                    self.overdue.remove(op)
                    self.give_back(op)
                case Probed(op, found):
                    assert len(found) == self.probes.pop(op)
                case StorageUp():
                    assert not self.is_up
                    self.is_up = True
                case StorageDown():
                    assert self.is_up
                    self.is_up = False

    @invariant()
    def agrees(self) -> None:
        self.world.store.check()
        stats = self.world.store.stats()
        assert stats.num_overdue_pages <= NUM_PAGES // 8
        assert stats.tenant_nbytes["tenant"] <= MAX_RECORDS * RECORD_NBYTES
        assert stats.day_written_nbytes <= 200 * RECORD_NBYTES
        held = [slot for taken, _, _ in self.lent.values() for slot in taken]
        assert len(held) == len(set(held))
        assert self.free.isdisjoint(held)
        assert len(self.free) + len(held) == NUM_PAGES
        for slot in self.free:
            assert self.world.page(slot) == MARK, "a free page was written"

    def end(self, op: OpId, outcomes: list[bool], *, is_returned: bool) -> None:
        taken, pages, kind = self.lent[op]
        assert op not in self.overdue
        assert len(outcomes) == len(pages)
        for slot, page, is_good in zip(taken, pages, outcomes, strict=True):
            if kind == "store":
                assert self.world.page(slot) == repetitive(page.key), "a source was written"
            elif is_good:
                assert page.key in self.accepted
                assert self.world.page(slot) == repetitive(page.key), "a hit has other bytes"
        if is_returned:
            self.give_back(op)
        else:
            self.overdue.add(op)

    # ------------------------------------------------------------ slots

    def take(self, num: int) -> list[int]:
        """Take slots, or wait for those that are lent."""
        if len(self.free) < num:
            self.settle()
        return [self.free.pop() for _ in range(num)]

    def begin(self, taken: list[int], pages: Sequence[PageRef], kind: str) -> OpId:
        op = self.world.new_op()
        self.lent[op] = (taken, pages, kind)
        return op

    def give_back(self, op: OpId) -> None:
        taken, _, _ = self.lent.pop(op)
        for slot in taken:
            self.mark(slot)
        self.free.update(taken)

    def mark(self, slot: int) -> None:
        self.world.memory[slot * PAGE_NBYTES : (slot + 1) * PAGE_NBYTES] = MARK

    def teardown(self) -> None:
        self.settle()
        assert self.world.store.close(WAIT_S)
        assert len(self.free) == NUM_PAGES
        assert self.world.store.drain() == []


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class CodedStoreMachine(StoreMachine):
    """The same where pages are made smaller and sealed, and one key has taken over from another."""

    storage: ClassVar[dict[str, object]] = {
        "codec": "zstd-planes",
        "key": f"{'5a' * 32}\n{'a5' * 32}",
    }


CodedStoreMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=40, deadline=None
)
TestCodedStoreMachine = pytest.mark.slow(CodedStoreMachine.TestCase)
TestStoreMachine = pytest.mark.slow(StoreMachine.TestCase)
