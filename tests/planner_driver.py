"""Does to a world whatever could happen to it; numbers pick one of what is there."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache.actions import Fetch, Refuse, Store
from hicache.events import (
    ChainFound,
    Flushed,
    Forgotten,
    Kept,
    Measured,
    OpId,
    StorageDown,
    StorageUp,
    Synced,
    Ticked,
)
from hicache.eviction import POLICIES as RANKS
from hicache.keys import PageKey, pack
from hicache.planner import PlannerConfig
from hicache.prefetch import BestEffort, Timeout, WaitComplete
from hicache.writing import ADMISSION
from hicache.writing import POLICIES as WRITING
from tests.planner_config import config
from tests.planner_pools import num_outcomes
from tests.planner_world import NAMESPACE, OTHER_NAMESPACE, Running, World

T = TypeVar("T")

MAX_RUNNING = 6
MAX_TOKENS = 60


def any_config(choose: Callable[[Sequence[T]], T]) -> PlannerConfig:
    """Return a configuration; ``choose`` picks one of several values."""
    pick: Callable[[Sequence[object]], object] = choose  # type: ignore[assignment]
    chosen = {
        "page_size": pick([1, 2, 4]),
        "device_pages": pick([6, 12, 24]),
        "host_pages": pick([0, 4, 16, 40]),
        "has_storage": pick([True, True, True, False]),
        "eviction": pick(list(RANKS)),
        "write": pick(list(WRITING)),
        "prefetch": pick([BestEffort(), WaitComplete(), Timeout(3, 1)]),
        "low_water_pages": pick([0, 2]),
        "batch_pages": pick([1, 3, 8]),
        "num_ghosts": pick([0, 5, 100]),
        "miss_memory_s": pick([0.0, 8.0]),
        "max_beliefs": pick([2, 100]),
        "admission": pick(list(ADMISSION)),
    }
    return config(**chosen)  # type: ignore[arg-type]


class Driver:
    """A world, and everything that may happen to it."""

    def __init__(self, settings: PlannerConfig) -> None:
        self.world = World(settings)
        self.page_size = settings.page_size

    # ------------------------------------------------------------ what there is

    @property
    def waiting(self) -> list[Running]:
        """Requests that do not run yet."""
        return [r for r in self.world.running.values() if not r.is_granted]

    @property
    def granted(self) -> list[Running]:
        """Requests that run."""
        return [r for r in self.world.running.values() if r.is_granted]

    @property
    def expirable(self) -> list[OpId]:
        """Operations with a deadline."""
        return self.world.ops(Fetch) + self.world.ops(Store)

    # ------------------------------------------------------------ requests

    def arrive(self, pick: int, num_tokens: int, bits: int, priority: int = 0) -> None:
        """Let a request arrive: zeros, or ones and zeros, or a copy of another and one more."""
        if len(self.world.running) >= MAX_RUNNING:
            return
        num_tokens = 1 + num_tokens % (self.world.settings.device_pages * self.page_size + 3)
        tokens = [bits >> index % 16 & 1 for index in range(num_tokens)]
        others = list(self.world.running.values())
        if pick % 3 == 0 and others:
            tokens = [*others[pick % len(others)].tokens[:num_tokens], 1]
        elif pick % 3 == 1:
            tokens = [0] * num_tokens
        namespace = OTHER_NAMESPACE if pick % 8 == 7 else NAMESPACE
        self.world.arrive(tokens, namespace, priority % 2)

    def want(self, pick: int, num_tokens_ahead: int) -> None:
        """Give a waiting request its turn; end it if it can never have one."""
        request = self.waiting[pick % len(self.waiting)]
        if isinstance(self.world.want(request, num_tokens_ahead), Refuse):
            self.world.release(request)

    def compute(self, pick: int, num_tokens: int) -> None:
        """Compute some tokens of a request that runs."""
        request = self.granted[pick % len(self.granted)]
        if request.num_computed < MAX_TOKENS:
            self.world.compute(request, num_tokens)

    def release(self, pick: int) -> None:
        """End a request in any state."""
        requests = list(self.world.running.values())
        self.world.release(requests[pick % len(requests)])

    def preempt(self) -> None:
        """Do as the planner asked: take a request's pages; it comes again."""
        request = self.world.running[self.world.preempted[0]]
        self.world.release(request)
        assert request.id not in self.world.preempted
        self.world.arrive(request.tokens, request.namespace, continues=request.user)

    # ------------------------------------------------------------ operations

    def finish(self, pick: int, bits: int) -> None:
        """Let an operation end; a bit of ``bits`` that is 0 is a page that failed."""
        ops = list(self.world.pending)
        op = ops[pick % len(ops)]
        count = num_outcomes(self.world.pending[op])
        self.world.finish(op, [bool(bits >> index % 16 & 1) for index in range(count)])

    def expire(self, pick: int) -> None:
        """Let a deadline pass."""
        self.world.expire(self.expirable[pick % len(self.expirable)])

    def come_back(self, pick: int) -> None:
        """Let an overdue call return."""
        overdue = list(self.world.overdue)
        self.world.come_back(overdue[pick % len(overdue)])

    # ------------------------------------------------------------ the world at large

    def lose(self, pick: int) -> None:
        """Let storage lose a few records."""
        records = sorted(self.world.pools.storage)
        self.world.pools.storage.difference_update(records[pick % len(records) :][:3])

    def find(self, pick: int) -> None:
        """Let a scan find a chain of records."""
        storage = self.world.pools.storage
        records = sorted(storage)
        namespace, tokens = self.world.chains[PageKey(records[pick % len(records)])]
        keys = self.world.keys_of(namespace, tokens)
        if storage.issuperset(keys):
            self.world.send(ChainFound(namespace, pack(tokens), tuple(keys)))

    def operate(self, pick: int, num_pages: int) -> None:
        """Do what an operator, or time, may do."""
        tokens = [pick >> index % 16 & 1 for index in range(num_pages * self.page_size)]
        self.world.send(
            [
                Flushed(),
                Synced(),
                StorageDown(),
                StorageUp(),
                StorageUp(),
                Forgotten(NAMESPACE, pack(tokens)),
                Forgotten(OTHER_NAMESPACE),
                Kept(NAMESPACE, pack(tokens or [0] * 8), self.world.now + 20),
                Measured(10, 10.0 if pick % 2 else 0.1),
                Ticked(),
            ][pick % 10]
        )


def run(seed: int, num_steps: int = 300) -> None:
    """Drive a world along a seed's path, check it after every step, and that it ends empty."""
    dice = random.Random(seed)
    driver = Driver(any_config(dice.choice))
    world = driver.world

    def roll() -> int:
        return dice.randrange(1 << 16)

    def bits() -> int:
        return 0xFFFF if dice.random() < 0.75 else roll() | roll()

    choices: list[tuple[int, Callable[[], object], Callable[[], None]]] = [
        (12, lambda: True, lambda: driver.arrive(roll(), roll(), roll(), roll())),
        (13, lambda: driver.waiting, lambda: driver.want(roll(), dice.choice([1, 4, 1000]))),
        (20, lambda: driver.granted, lambda: driver.compute(roll(), dice.choice([1, 2, 5, 9]))),
        (7, lambda: world.running, lambda: driver.release(roll())),
        (4, lambda: world.preempted, driver.preempt),
        (29, lambda: world.pending, lambda: driver.finish(roll(), bits())),
        (3, lambda: driver.expirable, lambda: driver.expire(roll())),
        (3, lambda: world.overdue, lambda: driver.come_back(roll())),
        (1, lambda: world.pools.storage, lambda: driver.lose(roll())),
        (1, lambda: world.pools.storage, lambda: driver.find(roll())),
        (7, lambda: True, lambda: driver.operate(roll(), dice.randrange(5))),
    ]
    weights = [weight for weight, _, _ in choices]
    for _ in range(num_steps):
        _, is_possible, do = dice.choices(choices, weights)[0]
        if is_possible():
            do()
            world.check()
    world.check_empty()
