"""A world for the planner: pools of markers, a dict for storage, and an engine of one line.

Every slot holds the key of the page that was written to it. So a page that is read where another
was written, a slot that is used again under a copy, a page that is served though it was lost: all
show as a wrong marker. A copy reads its source when it starts and when it ends, and both must be
what they should; it scribbles over its target from the first moment on.
"""

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hicache.actions import (
    Action,
    BackUp,
    Cancel,
    CopyPage,
    Delete,
    Fetch,
    Grant,
    Grown,
    Load,
    Preempt,
    Probe,
    Refuse,
    Revoke,
    Store,
    Touch,
    Wait,
)
from hicache.events import (
    Arrived,
    Computed,
    Event,
    Extended,
    Finished,
    OpId,
    Probed,
    Released,
    RequestId,
    Returned,
    Wanted,
)
from hicache.eviction import POLICIES as RANKS
from hicache.keys import NamespaceDigest, PageKey, chain, pack
from hicache.planner import Planner, PlannerConfig
from hicache.prefetch import BestEffort, PrefetchPolicy
from hicache.writing import POLICIES as WRITING

NAMESPACE = NamespaceDigest(b"n" * 32)
SCRIBBLE = b"scribble"


def config(
    *,
    page_size: int = 2,
    device_pages: int = 12,
    host_pages: int = 16,
    has_storage: bool = True,
    eviction: str = "lru",
    write: str = "write_through",
    prefetch: PrefetchPolicy | None = None,
    low_water_pages: int = 0,
    batch_pages: int = 4,
    num_ghosts: int = 100,
) -> PlannerConfig:
    """Return a small configuration."""
    return PlannerConfig(
        page_size=page_size,
        page_nbytes=64,
        device_pages=device_pages,
        host_pages=host_pages,
        has_storage=has_storage and host_pages > 0,
        device_rank=RANKS[eviction],
        host_rank=RANKS[eviction],
        writing=WRITING[write],
        prefetch=prefetch or BestEffort(),
        low_water_pages=low_water_pages,
        batch_pages=batch_pages,
        num_ghosts=num_ghosts,
        miss_memory_s=0.0,
    )


@dataclass
class Running:
    """A request as the engine sees it."""

    id: RequestId
    namespace: NamespaceDigest
    tokens: list[int]
    num_prompt: int
    keys: list[PageKey]
    slots: "array[int]" = field(default_factory=lambda: array("i"))
    num_hit_tokens: int = 0
    num_computed: int = 0
    committed: int = 0
    loads: set[OpId] = field(default_factory=set)
    is_granted: bool = False
    is_over: bool = False
    hit: object = None


class World:
    """Carries out what the planner wants, when it is told to."""

    def __init__(self, settings: PlannerConfig, seed: int = 0) -> None:
        self.planner = Planner(settings)
        self.settings = settings
        self.random = random.Random(seed)
        self.now = 0.0
        self.device: list[bytes] = [b""] * settings.device_pages
        self.host: list[bytes] = [b""] * settings.host_pages
        self.storage: set[bytes] = set()
        self.pending: dict[OpId, Action] = {}
        self.overdue: dict[OpId, Action] = {}
        self.cancelled: set[OpId] = set()
        self.running: dict[RequestId, Running] = {}
        self.preempted: list[RequestId] = []
        self.answers: list[Action] = []
        self.log: list[Action] = []
        self._num_requests = 0

    # ------------------------------------------------------------ events

    def send(self, event: Event) -> list[Action]:
        """Pass an event to the planner and start what it wants."""
        self.now += 1.0
        actions = self.planner.handle(event, self.now)
        self.log += actions
        for action in actions:
            self._start(action)
        return actions

    def arrive(
        self, tokens: Sequence[int], namespace: NamespaceDigest = NAMESPACE, priority: int = 0
    ) -> Running:
        """Let a request arrive."""
        self._num_requests += 1
        request = Running(
            RequestId(self._num_requests), namespace, list(tokens), len(tokens),
            self._keys(namespace, tokens),
        )  # fmt: skip
        self.running[request.id] = request
        self.send(Arrived(request.id, namespace, pack(tokens), max(len(tokens) - 1, 0), priority))
        return request

    def want(self, request: Running, num_tokens_ahead: int = 1000) -> Action:
        """Ask for a request's turn; return the answer."""
        actions = self.send(Wanted(request.id, num_tokens_ahead))
        (answer,) = [a for a in actions if isinstance(a, Grant | Wait | Refuse)]
        return answer

    def compute(self, request: Running, num_tokens: int) -> bool:
        """Compute and commit as an engine would; False if it could not go on."""
        assert request.is_granted
        if request.loads & self.pending.keys():
            return False
        page_size = self.settings.page_size
        end = request.num_computed + num_tokens
        while len(request.tokens) < end:
            request.tokens.append(self.random.randrange(3))
        request.keys = self._keys(request.namespace, request.tokens)
        if -(-end // page_size) > len(request.slots):
            self.send(Extended(request.id, -(-end // page_size)))
            if not request.is_granted or -(-end // page_size) > len(request.slots):
                return False
        self._read_prefix(request)
        for page in range(request.num_computed // page_size, -(-end // page_size)):
            full = (page + 1) * page_size <= end
            content = request.keys[page] if full else b"partial"
            self.device[request.slots[page]] = content
        request.num_computed = end
        full_pages = end // page_size
        if full_pages > request.committed:
            tokens = request.tokens[request.committed * page_size : full_pages * page_size]
            request.committed = full_pages
            self.send(Computed(request.id, pack(tokens)))
        return True

    def release(self, request: Running) -> None:
        """End a request, whatever its state."""
        self.send(Released(request.id))
        request.is_over, request.is_granted = True, False
        self.running.pop(request.id, None)
        if request.id in self.preempted:
            self.preempted.remove(request.id)

    def finish(self, op: OpId, outcomes: Iterable[bool] | None = None) -> None:
        """Let an operation end, well by default."""
        action = self.pending.pop(op)
        self.send(self._end(action, None if outcomes is None else list(outcomes)))

    def expire(self, op: OpId) -> None:
        """Let the deadline of a fetch or store pass; its call still owns the pages."""
        action = self.pending.pop(op)
        assert isinstance(action, Fetch | Store)
        self.overdue[op] = action
        self.send(Finished(op, [False] * len(action.pages), is_returned=False))

    def come_back(self, op: OpId) -> None:
        """Let an overdue call return, after it has written whatever it likes to its pages."""
        action = self.overdue.pop(op)
        if isinstance(action, Fetch):
            for slot in action.target:
                self.host[slot] = SCRIBBLE
        self.send(Returned(op))

    def settle(self) -> None:
        """Let everything in flight end well."""
        while self.pending or self.overdue:
            for op in list(self.overdue):
                self.come_back(op)
            for op in list(self.pending):
                if op in self.pending:
                    self.finish(op)

    def run(self, tokens: Sequence[int], *, num_new: int = 0) -> Running:
        """Run a request from arrival to release, everything in order; return it."""
        request = self.arrive(tokens)
        self.settle()
        for _ in range(50):
            answer = self.want(request)
            if isinstance(answer, Grant):
                break
            assert isinstance(answer, Wait), answer
            self.settle()
        else:
            raise AssertionError("never granted")
        self.settle()
        assert self.compute(request, len(tokens) - request.num_computed)
        for _ in range(num_new):
            while not self.compute(request, 1):
                self.settle()
        self.release(request)
        self.settle()
        return request

    # ------------------------------------------------------------ actions

    def _start(self, action: Action) -> None:
        match action:
            case Grant():
                request = self.running[action.request]
                request.slots, request.is_granted = action.slots[:], True
                request.loads = set(action.loads)
                request.hit = action.hit
                request.num_hit_tokens = request.num_computed = action.hit.total
                request.committed = action.hit.total // self.settings.page_size
            case Grown():
                self.running[action.request].slots += action.slots
            case Revoke():
                request = self.running[action.request]
                request.slots = action.slots[:]
                request.num_computed = request.num_hit_tokens = action.num_tokens
                request.committed = action.num_tokens // self.settings.page_size
            case Preempt():
                self.preempted.append(action.request)
            case Load() | BackUp() | CopyPage() | Fetch() | Store() | Probe():
                assert action.op not in self.pending
                self.pending[action.op] = action
                self._check_source(action)
                self._scribble(action)
            case Cancel():
                self.cancelled.add(action.op)
            case Delete():
                self.storage.difference_update(action.keys)
            case Touch() | Wait() | Refuse():
                pass
            case _:
                raise AssertionError(f"unknown action {action}")
        self.answers.append(action)

    def _source(self, action: Action) -> list[bytes]:
        match action:
            case Load():
                return [self.host[slot] for slot in action.source]
            case BackUp():
                return [self.device[slot] for slot in action.source]
            case Store():
                return [self.host[slot] for slot in action.source]
            case CopyPage():
                pool = self.device if action.source_tier == "device" else self.host
                return [pool[action.source]]
            case _:
                return []

    _sources: dict[OpId, list[bytes]]

    def _check_source(self, action: Action) -> None:
        if not hasattr(self, "_sources"):
            self._sources = {}
        source = self._source(action)
        assert SCRIBBLE not in source, f"reads what is being written: {action}"
        if isinstance(action, Store):
            assert source == [page.key for page in action.pages], "stores other pages"
        self._sources[action.op] = source  # type: ignore[attr-defined]

    def _scribble(self, action: Action) -> None:
        match action:
            case Load():
                for slot in action.target:
                    self.device[slot] = SCRIBBLE
            case BackUp() | Fetch():
                for slot in action.target:
                    self.host[slot] = SCRIBBLE
            case CopyPage():
                self.device[action.target] = SCRIBBLE

    def _end(self, action: Action, outcomes: list[bool] | None) -> Event:
        if isinstance(action, Probe):
            if outcomes is None:
                outcomes = [key in self.storage for key in action.keys]
            return Probed(action.op, outcomes)
        source = self._source(action)
        assert source == self._sources.pop(action.op), "a source changed under its copy"  # type: ignore[attr-defined]
        match action:
            case Load():
                outcomes = outcomes or [True] * len(action.target)
                for slot, content, good in zip(action.target, source, outcomes, strict=True):
                    self.device[slot] = content if good else SCRIBBLE
            case BackUp():
                outcomes = outcomes or [True] * len(action.target)
                for slot, content, good in zip(action.target, source, outcomes, strict=True):
                    self.host[slot] = content if good else SCRIBBLE
            case CopyPage():
                outcomes = outcomes or [True]
                self.device[action.target] = b"partial" if outcomes[0] else SCRIBBLE
            case Store():
                outcomes = outcomes or [True] * len(action.pages)
                self.storage.update(
                    page.key for page, good in zip(action.pages, outcomes, strict=True) if good
                )
            case Fetch():
                there = [page.key in self.storage for page in action.pages]
                outcomes = [a and b for a, b in zip(outcomes or there, there, strict=True)]
                for slot, page, good in zip(action.target, action.pages, outcomes, strict=True):
                    self.host[slot] = page.key if good else SCRIBBLE
            case _:
                raise AssertionError(action)
        return Finished(action.op, outcomes)

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Assert the planner's invariants, and that every resident page is what it should be."""
        self.planner.check()
        lent = [
            slot
            for action in [*self.pending.values(), *self.overdue.values()]
            if isinstance(action, BackUp | Fetch)
            for slot in action.target
        ]
        assert len(lent) == len(set(lent)), "two operations write one host page"
        for namespace in (NAMESPACE,):
            for node in self.planner.nodes(namespace):
                for index in range(node.num_pages):
                    key = node.key(index)
                    if index < len(node.device.slots):
                        assert self.device[node.device.slots[index]] == key, node
                    if index < len(node.host.slots):
                        assert self.host[node.host.slots[index]] == key, node
        for request in self.running.values():
            if request.is_granted and not request.loads & self.pending.keys():
                self._read_prefix(request)

    def _read_prefix(self, request: Running) -> None:
        for page in range(request.num_computed // self.settings.page_size):
            assert self.device[request.slots[page]] == request.keys[page], "wrong page in L1"

    def _keys(self, namespace: NamespaceDigest, tokens: Sequence[int]) -> list[PageKey]:
        page_size = self.settings.page_size
        whole = len(tokens) // page_size * page_size
        return chain(namespace, pack(tokens[:whole]), 4 * page_size)
