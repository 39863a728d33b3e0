"""The replay's decisions are the server's: one load, two bodies, the same actions."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hicache.actions import Action, BackUp, Fetch, Load, Probe, Store, Wait
from hicache.allocator import SlotAllocator
from hicache.cache import HiCache, Lease
from hicache.cache.opening import Parts, planner_config
from hicache.config import CacheConfig
from hicache.events import Event, OpId, RequestId
from hicache.keys import TOKEN_NBYTES
from hicache.layout import KVLayout
from hicache.planner import Planner, PlannerConfig
from hicache.pools import DevicePool, HostPool
from hicache.testing.transfers import FakeTransfer
from hicache.tools.replay.engine import Engine
from hicache.tools.replay.optimum import find_sharing
from hicache.tools.replay.replaying import open_world
from hicache.tools.replay.settings import Settings
from hicache.tools.replay.workload import Job, Workload, load
from tests.cache_world import FakeStore
from tests.replay.traces import trace_of

DEVICE_PAGES, HOST_PAGES = 12, 16
LAYOUT = KVLayout(1, 1, 1, "float32", page_size=1)


class RecordingPlanner(Planner):
    """A planner whose actions can be read afterwards."""

    def __init__(self, config: PlannerConfig) -> None:
        super().__init__(config)
        self.log: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide, and remember."""
        actions = super().handle(event, now)
        self.log += actions
        return actions


class Server:
    """The real cache, with an engine that runs one request after the other, and copies and
    storage that end in the order in which they were asked for."""

    def __init__(self, config: CacheConfig) -> None:
        self.now = 0.0
        device, host = DevicePool(LAYOUT, DEVICE_PAGES), HostPool(LAYOUT, HOST_PAGES)
        self.planner = RecordingPlanner(planner_config(LAYOUT, config, DEVICE_PAGES, HOST_PAGES))
        self.store = FakeStore(host, {})
        self.transfer = FakeTransfer(device, host)
        parts = Parts(
            self.planner, device, host, self.transfer, self.store, self.store.wake, config
        )
        self.cache = HiCache(LAYOUT, config, clock=lambda: self.now, parts=parts)
        self.num_ended = 0

    def run(self, job: Job) -> None:
        """Run one request from its arrival until nothing is left to do."""
        self.now = job.time_s
        request = RequestId(job.index)
        self.cache.prefetch(request, job.namespace, job.tokens, max_hit_tokens=job.num_pages)
        while not isinstance(lease := self.cache.acquire(request, job.num_pages), Lease):
            self.end_one()
        while lease.loads:
            self.end_one()
        if rest := job.tokens[lease.hit.total * TOKEN_NBYTES :]:
            self.cache.commit(lease, rest)
        self.cache.release(request)
        while self.end_one():
            pass

    def end_one(self) -> bool:
        """Let the oldest operation end; False where there is none."""
        operations = list(self._operations())
        if self.num_ended == len(operations):
            return False
        op, is_copy = operations[self.num_ended]
        self.num_ended += 1
        if is_copy:
            self.transfer.complete(op)
        else:
            self.store.complete(op)
        self.cache.poll()
        return True

    def _operations(self) -> Iterator[tuple[OpId, bool]]:
        for action in self.planner.log:
            if isinstance(action, Load | BackUp | Probe | Fetch | Store):
                yield action.op, isinstance(action, Load | BackUp)


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("seed", range(2))
def test_a_replay_takes_the_actions_of_the_server(write: str, seed: int) -> None:
    workload = load(trace_of(_requests(random.Random(seed)), block_size=1, gap_s=7.0))
    config = CacheConfig.model_validate({"page_size": 1, "host": {"write_policy": write}})
    server = Server(config)

    for job in workload.jobs:
        server.run(job)

    expected = _without_waits(server.planner.log)
    kinds = {type(action) for action in expected}
    assert kinds >= {Load, BackUp, Fetch, Store, Probe}, "the load does too little"
    assert _replayed(workload, write) == expected


def _replayed(workload: Workload, write: str) -> list[Action]:
    settings = Settings(
        l1=f"{DEVICE_PAGES}p", l2=f"{HOST_PAGES}p", l3="1000p", write=write, is_sequential=True
    )
    world, tally = open_world(workload, settings, find_sharing(workload))
    world.planner = Planner(replace(world.planner.config, slots=SlotAllocator))
    world.log = []
    Engine(settings, world, tally).run(workload.jobs)
    world.planner.check()
    return _without_waits(world.log)


def _without_waits(actions: list[Action]) -> list[Action]:
    """The replay does not ask for a request again that would be told to wait again."""
    return [action for action in actions if not isinstance(action, Wait)]


def _requests(rng: random.Random) -> list[list[int]]:
    """Chats that come back, and branch: block ids are chained."""
    chats: list[list[int]] = [[]]
    next_block = 1
    requests = []
    for _ in range(60):
        chat = rng.choice(chats)[: rng.randrange(10)]
        num_new = rng.randrange(1, 4)
        chat = [*chat, *range(next_block, next_block + num_new)]
        next_block += num_new
        chats.append(chat)
        requests.append(chat)
    return requests
