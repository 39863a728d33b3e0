"""HiCache against real bytes: copies and storage end in any order, well or badly."""

import random

import pytest
import torch

from hicache.cache import HiCache
from hicache.config import (
    CacheConfig,
    DeviceConfig,
    HostConfig,
    PrefetchPolicyName,
    StorageConfig,
    WritePolicyName,
)
from hicache.keys import PageKey
from hicache.testing.transfers import FakeTransfer
from tests.cache_world import LAYOUT, FakeStore, Reader, parts

PREFETCH: tuple[PrefetchPolicyName, ...] = ("best_effort", "wait_complete", "timeout")
WRITES: tuple[WritePolicyName, ...] = ("write_through", "write_through_selective", "write_back")


class Chaos:
    """Readers of one cache, and everything that may happen to them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.config = CacheConfig.model_validate(
            {
                "page_size": LAYOUT.page_size,
                "device": DeviceConfig(low_water=choose([0.0, 0.2])),
                "host": HostConfig(write_policy=choose(WRITES)),
                "storage": StorageConfig(prefetch=choose(PREFETCH)),
            }
        )
        self.sizes = choose([8, 16]), choose([8, 24])
        self.records: dict[PageKey, bytes] = {}
        self.readers: list[Reader] = []
        self.num_requests = 0
        self.now = 0.0
        self.num_hits = 0
        self._start()

    def _start(self) -> None:
        made = parts(self.config, LAYOUT, self.records, *self.sizes)
        assert isinstance(made.transfer, FakeTransfer)
        assert isinstance(made.store, FakeStore)
        self.transfer, self.store = made.transfer, made.store
        self.cache = HiCache(LAYOUT, self.config, parts=made, clock=self._clock)

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def step(self) -> None:
        """Let something happen."""
        often = [self.arrive, self.acquire, self.compute, self.copy, self.storage, self.poll]
        event = self.random.choice([*often, *often, self.release, self.late, self.lose])
        event()

    def arrive(self) -> None:
        """A request comes whose beginning others may have had."""
        if len(self.readers) < 4:
            self.num_requests += 1
            length = self.random.randrange(1, self.sizes[0] * LAYOUT.page_size)
            tokens = [self.random.randrange(2) if i % 5 == 4 else 0 for i in range(length)]
            self.readers.append(Reader(self.cache, self.num_requests, tokens))

    def acquire(self) -> None:
        """A waiting request asks for its turn."""
        waiting = [reader for reader in self.readers if reader.lease is None]
        if waiting:
            reader = self.random.choice(waiting)
            reader.try_acquire()
            self.num_hits += reader.num_computed

    def compute(self) -> None:
        """A running request goes on."""
        running = [reader for reader in self.readers if reader.lease is not None]
        if running:
            self.random.choice(running).compute(self.random.choice([1, 3, 100]))

    def release(self) -> None:
        """A request ends, in whatever state."""
        if self.readers:
            reader = self.readers.pop(self.random.randrange(len(self.readers)))
            reader.release()

    def copy(self) -> None:
        """A copy ends, now and then badly."""
        if self.transfer.pending:
            op = self.random.choice(list(self.transfer.pending))
            if self.random.random() < 0.1:
                self.transfer.fail(op)
            else:
                self.transfer.complete(op)

    def storage(self) -> None:
        """Storage answers, now and then badly, or much too late."""
        store = self.store
        if store.overdue and self.random.random() < 0.3:
            store.come_back(self.random.choice(list(store.overdue)))
        elif store.pending:
            op = self.random.choice(list(store.pending))
            if store.pending[op][0] == "fetch" and self.random.random() < 0.1:
                store.expire(op)
            else:
                store.complete(op, fails=self.random.random() < 0.1)

    def poll(self) -> None:
        """A step begins."""
        polled = self.cache.poll()
        for lease in polled.revoked:
            for reader in self.readers:
                if reader.lease is lease:
                    reader.num_computed = lease.num_valid_tokens
        for lease in polled.preempted:
            for reader in list(self.readers):
                if reader.lease is lease:
                    reader.release()
                    self.readers.remove(reader)

    def late(self) -> None:
        """Time passes."""
        self.now += self.random.choice([0.1, 10.0])

    def lose(self) -> None:
        """Storage loses a record behind our back."""
        if self.records and self.random.random() < 0.2:
            del self.records[self.random.choice(list(self.records))]

    def settle(self) -> None:
        """Let everything end, and nothing be left."""
        for reader in self.readers:
            reader.release()
        self.readers.clear()
        while self.transfer.pending or self.store.pending or self.store.overdue:
            self.transfer.complete_all()
            for op in list(self.store.overdue):
                self.store.come_back(op)
            for op in list(self.store.pending):
                self.store.complete(op)
            self.cache.poll()
        self.cache.poll()

    def restart(self) -> None:
        """The process ends; another one finds the same storage."""
        self.settle()
        self._start()


def _run(seed: int, num_steps: int) -> int:
    chaos = Chaos(seed)
    for step in range(num_steps):
        chaos.step()
        chaos.cache.check()
        for reader in chaos.readers:
            lease = reader.lease
            if lease is not None and not lease.loads and not lease.is_revoked:
                reader.check()
        if step == num_steps // 2:
            chaos.restart()
    chaos.settle()
    chaos.cache.check()
    return chaos.num_hits


@pytest.mark.parametrize("block", range(4))
def test_whatever_ends_in_whatever_order_only_right_bytes_are_served(block: int) -> None:
    hits = [_run(seed, 150) for seed in range(block * 15, block * 15 + 15)]

    assert sum(hits) > 0, "nothing was reused, so nothing was tested"


@pytest.mark.soak
def test_whatever_ends_in_whatever_order_for_long(is_full: bool) -> None:
    seeds = range(1000, 1000 + (2000 if is_full else 20))

    assert sum(_run(seed, 300) for seed in seeds) > 0


def test_a_lease_that_a_failed_copy_cut_back_still_waits_for_its_load() -> None:
    config = CacheConfig.model_validate({"page_size": LAYOUT.page_size})
    made = parts(config, LAYOUT, {}, 8, 24)
    transfer = made.transfer
    assert isinstance(transfer, FakeTransfer)
    cache = HiCache(LAYOUT, config, parts=made)
    for request, token_ids in enumerate([[5] * 4, [6] * 16]):  # the second fills all of L1
        reader = Reader(cache, request, token_ids)
        reader.acquire()
        assert reader.compute()
        transfer.complete_all()
        cache.poll()
        reader.release()
    reader = Reader(cache, 2, [5] * 4)
    lease = reader.acquire()
    load, copy = transfer.pending  # of the first page, and of a part of the second

    transfer.fail(copy)
    [revoked] = cache.poll().revoked

    assert (revoked, lease.num_valid_tokens, lease.loads) == (lease, 2, {load})
    reader.num_computed = lease.num_valid_tokens
    assert reader.compute()  # which waits, and checks every byte
    reader.release()


def test_a_wrong_byte_would_be_noticed() -> None:
    chaos = Chaos(1)
    reader = Reader(chaos.cache, 1, [0] * 6)
    for op in list(chaos.store.pending):
        chaos.store.complete(op)
    chaos.cache.poll()
    reader.acquire()
    assert reader.compute()

    assert reader.lease is not None
    chaos.cache.device_pages[reader.lease.slots[1]] = torch.zeros(LAYOUT.page_shape)

    with pytest.raises(AssertionError, match="page 1"):
        reader.check()
