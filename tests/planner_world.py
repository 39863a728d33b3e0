"""A world for the planner: pools of markers, and an engine of one line.

A page that is read where another was written, or served though it was lost, shows as a wrong
marker (see ``planner_pools``).
"""

import random
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hicache.actions import (
    Action,
    BackUp,
    Cancel,
    CopyPage,
    Delete,
    Fact,
    Fetch,
    Grant,
    Grown,
    HitTokens,
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
    Flushed,
    OpId,
    Released,
    RequestId,
    Returned,
    Wanted,
)
from hicache.eviction import Rank
from hicache.keys import NamespaceDigest, PageKey, chain, pack
from hicache.planner import Planner, PlannerConfig
from hicache.tree import Node
from tests.planner_pools import PARTIAL, Copy, Pools, num_outcomes

NAMESPACE = NamespaceDigest(b"n" * 32)
OTHER_NAMESPACE = NamespaceDigest(b"o" * 32)
MAX_EVENTS = 20_000
MAX_RANKS = 200_000


@dataclass(eq=False)
class Running:
    """A request as the engine sees it."""

    id: RequestId
    namespace: NamespaceDigest
    tokens: list[int]
    keys: list[PageKey]
    slots: "array[int]" = field(default_factory=lambda: array("i"))
    num_computed: int = 0
    committed: int = 0
    loads: set[OpId] = field(default_factory=set)
    is_granted: bool = False
    hit: HitTokens = field(default_factory=HitTokens)
    user: RequestId = field(default=RequestId(0))
    """The id under which it came first."""
    num_revoked: int = 0


class World:
    """Carries out what the planner wants, when it is told to."""

    def __init__(self, settings: PlannerConfig, seed: int = 0) -> None:
        self._num_ranks = self._num_events = self._num_requests = 0
        self.settings = replace(
            settings,
            device_rank=self._counted(settings.device_rank),
            host_rank=self._counted(settings.host_rank),
        )
        self.planner = Planner(self.settings)
        self.random = random.Random(seed)
        self.now = 1000.0
        self.step_s = 1.0
        """Time that each event takes."""
        self.pools = Pools(settings.device_pages, settings.host_pages)
        self.chains: dict[PageKey, tuple[NamespaceDigest, list[int]]] = {}
        """Every page that a request had: its namespace, and all tokens up to its end."""
        self.pending: dict[OpId, Copy] = {}
        self.overdue: dict[OpId, Fetch | Store] = {}
        self.cancelled: set[OpId] = set()
        self.running: dict[RequestId, Running] = {}
        self.preempted: list[RequestId] = []
        self.log: list[Action] = []
        self.facts: list[Fact] = []
        self.users: defaultdict[PageKey, set[RequestId]] = defaultdict(set)
        """Who has used each page; a request that comes again after a preemption is no other."""

    # ------------------------------------------------------------ events

    def send(self, event: Event) -> list[Action]:
        """Pass an event to the planner and start what it wants."""
        self._num_events += 1
        self._num_ranks = 0
        assert self._num_events < MAX_EVENTS, "this never ends"
        self.now += self.step_s
        actions = self.planner.handle(event, self.now)
        self.facts += self.planner.take_facts()
        self.log += actions
        for action in actions:
            self.carry_out(action)
        return actions

    def arrive(
        self,
        tokens: Sequence[int],
        namespace: NamespaceDigest = NAMESPACE,
        priority: int = 0,
        continues: RequestId | None = None,
    ) -> Running:
        """Let a request arrive, perhaps one that was preempted."""
        self._num_requests += 1
        keys = self.keys_of(namespace, tokens)
        request = Running(RequestId(self._num_requests), namespace, list(tokens), keys)
        request.user = request.id if continues is None else continues
        self.running[request.id] = request
        max_hit_tokens = max(len(tokens) - 1, 0)
        self.send(Arrived(request.id, namespace, pack(tokens), max_hit_tokens, priority, continues))
        return request

    def want(self, request: Running, num_tokens_ahead: int = 1000) -> Action:
        """Ask for a request's turn; return the answer."""
        actions = self.send(Wanted(request.id, num_tokens_ahead))
        (answer,) = [a for a in actions if isinstance(a, Grant | Wait | Refuse)]
        return answer

    def extend(self, request: Running, num_pages: int) -> Action:
        """Ask for slots for so many pages in all; return the answer."""
        actions = self.send(Extended(request.id, num_pages))
        (answer,) = [a for a in actions if isinstance(a, Grown | Wait | Refuse)]
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
        request.keys = self.keys_of(request.namespace, request.tokens)
        num_pages = -(-end // page_size)
        if num_pages > len(request.slots) and not isinstance(
            self.extend(request, num_pages), Grown
        ):
            return False
        self._read_prefix(request)
        for page in range(request.num_computed // page_size, num_pages):
            is_full = (page + 1) * page_size <= end
            self.pools.device[request.slots[page]] = request.keys[page] if is_full else PARTIAL
        request.num_computed = end
        self._note_users(request, end // page_size)
        if end // page_size > request.committed:
            first, request.committed = request.committed * page_size, end // page_size
            tokens = request.tokens[first : request.committed * page_size]
            self.send(Computed(request.id, pack(tokens)))
        return True

    def release(self, request: Running) -> None:
        """End a request, whatever its state."""
        self.send(Released(request.id))
        request.is_granted = False
        self.running.pop(request.id, None)
        if request.id in self.preempted:
            self.preempted.remove(request.id)

    def finish(self, op: OpId, outcomes: Iterable[bool] | None = None) -> None:
        """Let an operation end, well by default."""
        action = self.pending.pop(op)
        good = [True] * num_outcomes(action) if outcomes is None else list(outcomes)
        self.send(self.pools.end(action, good))

    def fail(self, op: OpId) -> None:
        """Let an operation end with nothing done."""
        self.finish(op, [False] * num_outcomes(self.pending[op]))

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
            self.pools.scribble(action)
        self.pools.give_back(action)
        self.send(Returned(op))

    def settle(self) -> None:
        """Let everything in flight end well."""
        while self.pending or self.overdue:
            for op in list(self.overdue):
                self.come_back(op)
            for op in list(self.pending):
                if op in self.pending:
                    self.finish(op)

    def start(
        self, tokens: Sequence[int], namespace: NamespaceDigest = NAMESPACE, *, ahead: int = 1000
    ) -> Running:
        """Let a request arrive and be granted, with everything in flight settled."""
        request = self.arrive(tokens, namespace)
        self.settle()
        for _ in range(50):
            answer = self.want(request, ahead)
            self.settle()
            if isinstance(answer, Grant):
                return request
            assert isinstance(answer, Wait), answer
        raise AssertionError("never granted")

    def run(
        self, tokens: Sequence[int], namespace: NamespaceDigest = NAMESPACE, *, num_new: int = 0
    ) -> Running:
        """Run a request from arrival to release, everything in order; return it."""
        request = self.start(tokens, namespace)
        for num_tokens in [len(tokens) - request.num_computed, *[1] * num_new]:
            while not self.compute(request, num_tokens):
                self.settle()
        self.release(request)
        self.settle()
        return request

    # ------------------------------------------------------------ actions

    def carry_out(self, action: Action) -> None:
        """Start what the planner wants."""
        match action:
            case Grant():
                request = self.running[action.request]
                request.slots, request.is_granted = action.slots[:], True
                request.loads, request.hit = set(action.loads), action.hit
                request.num_computed = action.hit.total
                request.committed = action.hit.total // self.settings.page_size
                self._note_users(request, request.committed)
                for op in action.loads:
                    self._check_partial(request, op)
            case Grown():
                self.running[action.request].slots += action.slots
            case Revoke():
                request = self.running[action.request]
                request.slots, request.num_computed = action.slots[:], action.num_tokens
                request.committed = action.num_tokens // self.settings.page_size
                request.num_revoked += 1
            case Preempt():
                self.preempted.append(action.request)
            case Load() | BackUp() | CopyPage() | Fetch() | Store() | Probe():
                assert action.op not in self.pending
                if isinstance(action, Store):
                    self._check_store(action)
                self.pending[action.op] = action
                self.pools.begin(action)
            case Cancel():
                self.cancelled.add(action.op)
            case Delete():
                self.pools.storage.difference_update(action.keys)
            case Touch() | Wait() | Refuse():
                pass
            case _:
                raise AssertionError(f"unknown action {action}")

    def _check_store(self, action: Store) -> None:
        """Assert that L3 takes each page of a store now, and all that is above it before or with
        it."""
        for page in action.pages:
            min_users = self.settings.min_store_users
            assert min_users == 1 or len(self.users[page.key]) >= min_users, "taken too early"
        last = action.pages[-1].key
        believed = {page.key for page in action.pages}
        for node in self.planner.nodes(action.namespace):
            believed.update(node.leading_keys(node.stored + node.storing))
        namespace, tokens = self.chains[last]
        assert believed.issuperset(self.keys_of(namespace, tokens)), "its ancestors are missing"

    def _note_users(self, request: Running, num_pages: int) -> None:
        if self.settings.min_store_users > 1:
            for key in request.keys[:num_pages]:
                self.users[key].add(request.user)

    def _check_partial(self, request: Running, op: OpId) -> None:
        action = self.pending[op]
        if isinstance(action, CopyPage):
            (key,) = self.pools.source(action)
            namespace, tokens = self.chains[PageKey(key)]
            num_tokens = len(tokens) - self.settings.page_size + action.num_tokens
            assert namespace == request.namespace
            assert tokens[:num_tokens] == request.tokens[:num_tokens], "not the same prefix"
            assert action.target == request.slots[request.committed]

    # ------------------------------------------------------------ looking

    def ops(self, kind: type[Action]) -> list[OpId]:
        """Return the operations of a kind that are in flight, in order."""
        return [op for op, action in self.pending.items() if isinstance(action, kind)]

    def done(self, kind: type[Action]) -> int:
        """Return how many actions of a kind the planner has wanted so far."""
        return sum(isinstance(action, kind) for action in self.log)

    def where(self, tokens: Sequence[int], namespace: NamespaceDigest = NAMESPACE) -> list[str]:
        """Return for each whole page the tiers that have it, as "123"; L3 where it is believed."""
        found = {}
        for node in self.planner.nodes(namespace):
            for index in range(node.num_pages):
                found[node.key(index)] = _tiers(node, index)
        return [found.get(key, "") for key in self.keys_of(namespace, tokens)]

    def why(self, request: Running) -> list[tuple[str, int]]:
        """Return why pages of a request were missed, and how many."""
        return [
            (f.reason, f.num_pages)
            for f in self.facts
            if f.kind == "missed" and f.request == request.id
        ]

    def count(self, kind: str, reason: str | None = None) -> int:
        """Return the pages of all facts of a kind, and with a reason if one is given."""
        return sum(
            fact.num_pages
            for fact in self.facts
            if fact.kind == kind and reason in (None, fact.reason)
        )

    def check(self) -> None:
        """Assert the planner's invariants, and that every resident page is what it should be."""
        self.planner.check()
        in_flight = [*self.pending.values(), *self.overdue.values()]
        lent = [slot for a in in_flight if isinstance(a, BackUp | Fetch) for slot in a.target]
        assert len(lent) == len(set(lent)), "two operations write one host page"
        for namespace in (NAMESPACE, OTHER_NAMESPACE):
            for node in self.planner.nodes(namespace):
                for index, slot in enumerate(node.device.slots):
                    assert self.pools.device[slot] == node.key(index), node
                for index, slot in enumerate(node.host.slots):
                    assert self.pools.host[slot] == node.key(index), node
        for request in self.running.values():
            if request.is_granted and not request.loads & self.pending.keys():
                self._read_prefix(request)

    def check_empty(self) -> None:
        """Assert that all L1 and L2 can be had again once all requests are gone."""
        for request in list(self.running.values()):
            self.release(request)
        self.settle()
        self.check()
        usage = self.planner.usage()
        assert usage["operations"] == usage["requests"] == 0
        self.send(Flushed())
        self.settle()
        self.check()
        assert self.planner.usage()["device"] == self.planner.usage()["host"] == 0

    def _read_prefix(self, request: Running) -> None:
        for page in range(request.num_computed // self.settings.page_size):
            assert self.pools.device[request.slots[page]] == request.keys[page], "wrong page in L1"

    def keys_of(self, namespace: NamespaceDigest, tokens: Sequence[int]) -> list[PageKey]:
        """Return the keys of whole pages, and remember what they stand for."""
        page_size = self.settings.page_size
        whole = len(tokens) // page_size * page_size
        keys = chain(namespace, pack(tokens[:whole]), 4 * page_size)
        for index, key in enumerate(keys):
            self.chains.setdefault(key, (namespace, list(tokens[: (index + 1) * page_size])))
        return keys

    def _counted(self, rank: Rank) -> Rank:
        def counted(node: Node) -> object:
            self._num_ranks += 1
            assert self._num_ranks < MAX_RANKS, "this event never ends"
            return rank(node)

        return counted


def _tiers(node: Node, index: int) -> str:
    residences = [len(node.device.slots), len(node.host.slots), node.stored]
    return "".join(str(tier + 1) for tier, reach in enumerate(residences) if index < reach)
