"""A slow store costs a request at most a twentieth of what computing its tokens would take.

Time is a clock that the test holds; what is asserted is what it shows, not how long this ran.
"""

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from hicache.actions import HitTokens, Refuse, Wait
from hicache.backends.memory import MemoryBackend
from hicache.cache import HiCache, Lease
from hicache.cache.opening import Parts, open_parts
from hicache.config import CacheConfig
from hicache.engine.model import LoadedModel
from hicache.events import RequestId
from hicache.layout import KVLayout
from hicache.store import PageStore
from hicache.testing import Fault, FaultyBackend, Gate
from hicache.transfer import open_transfer
from tests.cache_child import namespace
from tests.cache_world import LAYOUT, Reader, tokens_of
from tests.engine.kit import GREEDY, Unhurried, greedy_reference, make_engine, prompt
from tests.stores import FakeClock

Clock = Callable[[], float]

IDS = tokens_of(1, 1000)
NUM_READS = 4
"""Of 128 pages of 2 tokens, at most, one after the other."""
READ_TOKENS = 256

TOKENS_PER_S = 100.0
"""What computing takes, as the caches here are told."""
COMPUTE_S = len(IDS) / TOKENS_PER_S
SHARE = 0.05
STEP_S = COMPUTE_S / 1000
"""By how much a test moves its clock at a time."""


def parts_over(
    backend: FaultyBackend, layout: KVLayout, config: CacheConfig, clock: Clock
) -> Parts:
    """Return the parts of a cache whose storage is that backend."""
    parts = open_parts(layout, config, "cpu", clock)
    assert parts.store is not None
    parts.store.close(1)
    parts.transfer.close()
    parts.store = PageStore(
        backend,
        parts.host.memory,
        layout.page_nbytes,
        config.storage,
        page_size=layout.page_size,
        clock=clock,
    )
    parts.store.start()
    parts.wake = parts.store.wake
    parts.transfer = open_transfer(parts.device, parts.host, parts.wake)
    return parts


class Throttled:
    """A cache over a store in memory whose reads a test holds up, and their clock.

    ``IDS`` are in storage, and nowhere else.
    """

    def __init__(self) -> None:
        config = CacheConfig.model_validate(
            {
                "page_size": LAYOUT.page_size,
                "device": {"size": "600p"},
                "host": {"size": "2000p"},
                "storage": {"backend": "memory", "size": "64MB", "concurrency": 1},
            }
        )
        self.time = FakeClock()
        self.backend = FaultyBackend(MemoryBackend())
        self.gates = [Gate() for _ in range(NUM_READS)]
        parts = parts_over(self.backend, LAYOUT, config, self.time)
        self.cache = HiCache(LAYOUT, config, clock=self.time, parts=parts)
        self._digest = self.cache.open_namespace(namespace())
        self._ids = itertools.count(1)
        first = self.arrive()
        first.acquire()
        assert first.compute()
        first.release()
        self.cache.flush(30)
        self.cache.measured(round(10 * TOKENS_PER_S), 10.0)
        self.backend.next("get", *[Fault(before=gate) for gate in self.gates])

    @property
    def num_read_pages(self) -> int:
        """Pages that storage has given back."""
        stats = self.cache.stats().store
        assert stats is not None
        return stats.num_fetched_pages

    def arrive(self) -> Reader:
        """Return a request for ``IDS`` that has just arrived."""
        return Reader(self.cache, next(self._ids), IDS, self._digest)

    def read(self) -> None:
        """Let the next read through, and wait until it has landed."""
        before = self.num_read_pages
        gate = self.gates.pop(0)
        self.poll_until(lambda: gate.is_reached)
        gate.open()
        self.poll_until(lambda: self.num_read_pages > before)
        if self.gates:
            self.poll_until(lambda: self.gates[0].is_reached)

    def poll_until(self, is_done: Callable[[], bool]) -> None:
        """Poll until something has happened, while time stands still."""
        for _ in range(5_000):
            if is_done():
                return
            self.cache.wait_for_progress(0.01)
            self.cache.poll()
        raise AssertionError("it did not happen")

    def wait(self, request: Reader, read_s: float = float("inf")) -> tuple[Lease, float]:
        """Let time pass, and a read land every ``read_s``; return what is leased, and when."""
        began, num_read = self.time.now, 0
        while not isinstance(answer := request.try_acquire(), Lease):
            assert answer == Wait(request.id, "storage")
            self.time.now += STEP_S
            while self.gates and self.time.now >= began + (num_read + 1) * read_s:
                self.read()
                num_read += 1
            self.cache.poll()
        return answer, self.time.now - began

    def close(self) -> None:
        """Let everything through, and end."""
        for gate in self.gates:
            gate.open()
        self.cache.check()
        self.cache.close()


@pytest.fixture
def throttled() -> Iterator[Throttled]:
    throttled = Throttled()
    yield throttled
    throttled.close()


@pytest.mark.parametrize("num_read", range(NUM_READS))
def test_what_does_not_land_in_time_is_computed(throttled: Throttled, num_read: int) -> None:
    request = throttled.arrive()
    for _ in range(num_read):
        throttled.read()

    lease, waited_s = throttled.wait(request)

    assert lease.hit == HitTokens(storage=num_read * READ_TOKENS)
    assert waited_s <= SHARE * COMPUTE_S + STEP_S
    request.release()


def test_what_has_landed_is_not_waited_for(throttled: Throttled) -> None:
    request = throttled.arrive()
    for _ in range(NUM_READS):
        throttled.read()
    throttled.poll_until(lambda: isinstance(request.try_acquire(), Lease))

    assert request.lease is not None
    assert request.lease.hit == HitTokens(storage=len(IDS) - 1)
    request.release()


@pytest.mark.parametrize("read_share", [0.002, 0.01, 0.02, 0.04, 0.06, 0.2, 5.0])
def test_at_no_speed_is_a_hit_in_storage_slower_than_computing(
    throttled: Throttled, read_share: float
) -> None:
    """``read_share``: what a quarter of the pages takes, of what computing all of them does."""
    request = throttled.arrive()

    lease, waited_s = throttled.wait(request, read_s=read_share * COMPUTE_S)

    took_s = waited_s + (len(IDS) - lease.hit.total) / TOKENS_PER_S
    assert waited_s <= SHARE * COMPUTE_S + STEP_S
    assert took_s <= (1 + SHARE) * COMPUTE_S + STEP_S
    # What landed in time was used.
    num_landed = min(NUM_READS, int(waited_s / (read_share * COMPUTE_S) + 1e-6))
    assert lease.hit.total == min(num_landed * READ_TOKENS, len(IDS) - 1)
    request.release()


class TickingClock:
    """Time passes only by being asked for: a millisecond each time, in any thread."""

    def __init__(self) -> None:
        self._ticks = itertools.count()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return next(self._ticks) / 1000


class Watched(Unhurried):
    """A cache that notes when a request first asked, and when it got its lease."""

    def __init__(self, layout: KVLayout, config: CacheConfig, clock: Clock, parts: Parts) -> None:
        super().__init__(layout, config, clock=clock, parts=parts)
        self._watch = clock
        self.asked: dict[RequestId, float] = {}
        self.granted: dict[RequestId, float] = {}

    def acquire(self, request: RequestId, num_tokens_ahead: int) -> Lease | Wait | Refuse:
        """Note the time."""
        self.asked.setdefault(request, self._watch())
        answer = super().acquire(request, num_tokens_ahead)
        if isinstance(answer, Lease):
            self.granted[request] = self._watch()
        return answer


@pytest.mark.slow
def test_a_store_that_hangs_holds_an_engine_up_no_longer(llama: LoadedModel) -> None:
    backend, gate, clock = FaultyBackend(MemoryBackend()), Gate(), TickingClock()
    ids = prompt(600)

    def open_watched(layout: KVLayout, config: CacheConfig, device: str) -> Watched:
        watched = Watched(layout, config, clock, parts_over(backend, layout, config, clock))
        HiCache.measured(watched, round(10 * TOKENS_PER_S), 10.0)
        return watched

    with make_engine(
        llama, open_watched, cache__device__size="100p", cache__storage__backend="memory"
    ) as engine:
        list(engine.submit(ids, GREEDY))
        assert engine.flush(30)
        backend.always(Fault(before=gate), "get")
        generation = engine.submit(ids, GREEDY)
        said = [token_id for output in generation for token_id in output.token_ids]
        gate.open()
        cache = engine.cache
        assert isinstance(cache, Watched)

    last = max(cache.granted)
    assert backend.num_calls["get"] > 0
    assert generation.hit == HitTokens()
    assert said == greedy_reference(llama, ids, len(said))
    # And a few ticks, by which the clock moves between two looks at it.
    assert cache.granted[last] - cache.asked[last] <= SHARE * len(ids) / TOKENS_PER_S + 0.05
