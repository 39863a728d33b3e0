"""The body of a replay: it carries out what the planner wants, in virtual time.

Each hop carries its copies one after the other. What an operation brings is there when its time
has come; nothing moves, for there is no memory behind the slots.
"""

import heapq
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
    Store,
    Touch,
    Wait,
)
from hicache.events import Event, Finished, Probed, Ticked
from hicache.planner import Planner, PlannerConfig
from hicache.tools.replay.settings import Hop, Hops
from hicache.tools.replay.storage import VirtualStore
from hicache.tools.replay.tally import Tally

Operation = Load | CopyPage | BackUp | Fetch | Store | Probe
Answer = Grant | Grown | Wait | Refuse


@dataclass(slots=True)
class _Link:
    """A hop, and until when it is busy."""

    hop: Hop
    free_at: float = 0.0

    def end(self, now: float, nbytes: int) -> float:
        """Return when a copy that is asked for now will have arrived."""
        start = max(now, self.free_at)
        self.free_at = start + nbytes / self.hop.nbytes_per_s
        return self.free_at + self.hop.latency_s


@dataclass(order=True, slots=True)
class _Completion:
    time_s: float
    number: int
    """In the order in which they were asked for: this decides between equal times."""
    action: Operation = field(compare=False)


class World:
    """A planner, and everything that it plans for, but the engine."""

    def __init__(
        self, config: PlannerConfig, hops: Hops, store: VirtualStore, tally: Tally
    ) -> None:
        self.planner = Planner(config)
        self.now = 0.0
        self._page_nbytes = config.page_nbytes
        self.store = store
        self._tally = tally
        self._loads, self._back_ups = _Link(hops.load), _Link(hops.back_up)
        self._fetches, self._stores = _Link(hops.fetch), _Link(hops.store)
        self._pending: list[_Completion] = []
        self._num_operations = 0
        self.log: list[Action] | None = None
        """Every action, where somebody wants to see them."""

    def send(self, event: Event) -> Answer | None:
        """Tell the planner, start what it wants, and return its answer to a request, if any."""
        answer: Answer | None = None
        actions = self.planner.handle(event, self.now)
        if self.log is not None:
            self.log += actions
        for action in actions:
            if isinstance(action, Answer):
                answer = action
            elif isinstance(action, Operation):
                self._begin(action)
            elif isinstance(action, Touch):
                self.store.touch(action.keys)
            elif isinstance(action, Delete):
                self.store.delete(action.keys)
            else:  # what is cancelled ends all the same; nobody is preempted for an output
                assert isinstance(action, Cancel | Preempt), action
        facts = self.planner.take_facts()
        if facts:
            self._tally.add(facts, self.now)
        return answer

    def next_time(self) -> float:
        """Return when something ends, or the planner wants to be woken; infinity if never."""
        deadline = self.planner.next_deadline()
        ends = self._pending[0].time_s if self._pending else float("inf")
        return ends if deadline is None else min(ends, deadline)

    def advance(self) -> Operation | None:
        """Go to ``next_time`` and tell the planner what happens then.

        Returns the operation that has ended; None where only time has passed.
        """
        time_s = self.next_time()
        self.now = max(self.now, time_s)
        if not self._pending or self._pending[0].time_s > time_s:
            self.send(Ticked())
            return None
        action = heapq.heappop(self._pending).action
        self.send(self._end(action))
        return action

    def _begin(self, action: Operation) -> None:
        self._num_operations += 1
        completion = _Completion(self._end_time(action), self._num_operations, action)
        heapq.heappush(self._pending, completion)

    def _end_time(self, action: Operation) -> float:
        nbytes, tally, now = self._page_nbytes, self._tally, self.now
        match action:
            case Load():
                tally.num_loaded += len(action.source)
                return self._loads.end(now, len(action.source) * nbytes)
            case CopyPage() if action.source_tier == "device":
                return now  # as fast as memory, against any hop
            case CopyPage():
                tally.num_loaded += 1
                return self._loads.end(now, nbytes)
            case BackUp():
                tally.num_backed_up += len(action.source)
                return self._back_ups.end(now, len(action.source) * nbytes)
            case Fetch():
                tally.num_fetched += len(action.pages)
                return self._fetches.end(now, len(action.pages) * nbytes)
            case Store():
                tally.num_stored += len(action.pages)
                return self._stores.end(now, len(action.pages) * nbytes)
            case Probe():
                return now + self._fetches.hop.latency_s

    def _end(self, action: Operation) -> Event:
        match action:
            case Probe():
                return Probed(action.op, self.store.has(action.keys))
            case Fetch():
                return Finished(action.op, self.store.read(action.pages))
            case Store():
                self.store.write(action.pages)
                return Finished(action.op, [True] * len(action.pages))
            case CopyPage():
                return Finished(action.op, [True])
            case Load() | BackUp():
                return Finished(action.op, [True] * len(action.source))
