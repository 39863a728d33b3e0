"""Which operation waits for what, which pages are lent, and what has happened: the book-keeping.

Pure: no backend, no loop, and its only clock is the one that it is given. One lock guards it all,
so that the step thread submits, cancels and drains while the loop thread takes and finishes calls,
and so that a deadline is kept even where a backend blocks the loop.

A call ends twice at most: when its deadline passes (``give_up``: its pages are resolved, and stay
lent) and when it has really returned (``finish``).

Two lanes, so that reads never wait behind writes. Each may have ``max_calls`` calls that nobody
has given up, and a share of the pool in its calls, given up or not: 3/32 for reads, which requests
wait for, and 1/32 for writes, but a page at least. So at most 1/8 of the pool is ever lent to
overdue calls; a lane whose share is all overdue takes nothing in.

Invariants, asserted by ``check``:
  1. An operation's keys are resolved, queued, or in calls that run: each exactly one of these.
  2. A page that a fetch may write is in no other call.
  3. A lane never holds more than its share of the pool.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from hicache.events import Event, Finished, OpId, Probed, Returned
from hicache.store.operations import AWAITED, KINDS, MISSED, Call, Kind, Lane, Operation, Part

_READS: tuple[Kind, ...] = ("probe", "fetch")
_READ_SHARE, _WRITE_SHARE, _SHARES = 3, 1, 32
"""Parts of the pool that a lane may hold, and of how many."""
_MAX_QUEUED_KEYS = 1 << 18
"""Of deletes, and of touches: keys alone are cheap, and who forgets a prefix means it."""


class Ledger:
    """Operations, calls and lent pages. Every method may be called from any thread.

    ``wake`` is set whenever ``drain`` has something to give.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        max_batch: int,
        max_calls: int,
        max_queued: int,
        deadline_s: float,
        clock: Callable[[], float],
        wake: threading.Event,
    ) -> None:
        self._lock = threading.RLock()
        self._over = threading.Condition(self._lock)
        self._read = Lane(max(1, num_pages * _READ_SHARE // _SHARES))
        self._write = Lane(max(1, num_pages * _WRITE_SHARE // _SHARES))
        self._awaited: dict[OpId, Operation] = {}
        self._writes: set[Operation] = set()
        self._outbox: list[Event] = []
        self._num_queued: Counter[Kind] = Counter()
        self._num_dropped: Counter[tuple[Kind, str]] = Counter()
        self._num_missed: Counter[Kind] = Counter()
        self._expired: list[Call] = []
        self._refusals: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
        self._is_paused = False
        self._max_batch = max_batch
        self._max_calls = max_calls
        self._max_queued = max_queued
        self._deadline_s = deadline_s
        self._clock = clock
        self._wake = wake

    # ------------------------------------------------------------ operations

    def submit(self, operation: Operation) -> bool:
        """Queue an operation, or as much of it as there is room for; whether there was any.

        What cannot be queued is resolved at once, as False.
        """
        kind, length = operation.kind, len(operation.keys)
        with self._lock:
            operation.outcomes = [False] * length
            operation.asked = self._clock()
            if operation.op is not None:
                assert operation.op not in self._awaited
                self._awaited[operation.op] = operation
            lane = self._lane(kind)
            if lane is self._write:
                self._writes.add(operation)
            room, reason = self._room(kind)
            operation.stop = min(length, room)
            if operation.stop:
                self._num_queued[kind] += operation.stop
                (lane.urgent if kind == "probe" else lane.queue).append(operation)
            self._resolve(operation, length - operation.stop, reason)
            return operation.stop > 0

    def cancel(self, op: OpId) -> None:
        """Drop what no call has taken yet. Harmless for an operation that is over."""
        with self._lock:
            if operation := self._awaited.get(op):
                self._unqueue(operation, "cancelled")

    def refuse(self, kinds: Iterable[Kind], reason: str) -> None:
        """Resolve all that is queued of these kinds, and whatever comes from now on, as False."""
        with self._lock:
            for kind in kinds:
                self._refusals[kind].append(reason)
                self._drop_queued(kind, reason)

    def accept(self, kinds: Iterable[Kind], reason: str) -> None:
        """Take these kinds in again, which were refused for this reason."""
        with self._lock:
            for kind in kinds:
                self._refusals[kind].remove(reason)

    def pause(self) -> None:
        """Keep what is queued back until ``resume``."""
        with self._lock:
            self._is_paused = True
            self._over.notify_all()

    def resume(self) -> None:
        """Let what is queued go on."""
        with self._lock:
            self._is_paused = False

    # ------------------------------------------------------------ calls

    def take(self, now: float) -> Call | None:
        """Return the next call to make, ``None`` if there is none for now. Reads come first."""
        with self._lock:
            if self._is_paused or self._expired:
                return None
            for lane in (self._read, self._write):
                for queue in (lane.urgent, lane.queue):
                    if parts := self._next_parts(lane, queue):
                        return self._start(lane, parts, now)
            return None

    def overdue(self, now: float) -> list[Call]:
        """Return the calls whose deadline has passed and that nobody has given up yet."""
        with self._lock:
            running = [*self._read.running, *self._write.running]
            return [call for call in running if call.deadline <= now]

    def expire(self, now: float) -> bool:
        """Give up all calls that are overdue; whether there were any that nobody had yet.

        Nothing is handed out until somebody has looked at them with ``take_expired``.
        """
        with self._lock:
            expired = [call for call in self.overdue(now) if self.give_up(call)]
            self._expired += expired
            return bool(expired)

    def is_neglected(self, now: float) -> bool:
        """Whether nobody has looked at a call that ``expire`` gave up, though it is past ``now``.

        Whoever should look is blocked, then.
        """
        with self._lock:
            return any(call.deadline <= now for call in self._expired)

    def take_expired(self) -> list[Call]:
        """Return the calls that ``expire`` gave up since the last time."""
        with self._lock:
            expired, self._expired = self._expired, []
            return expired

    def give_up(self, call: Call) -> bool:
        """Stop waiting for a call: its pages are resolved as False, and stay lent.

        Returns whether it was still waited for.
        """
        with self._lock:
            lane = self._lane(call.kind)
            if call.is_given_up or call not in lane.calls:
                return False
            call.is_given_up = True
            for part in call.parts:
                self._resolve(part.operation, part.stop - part.start, "deadline")
            if lane.num_overdue >= lane.max_lent:
                self._drop_queued(call.kind, "lent")
            return True

    def finish(self, call: Call, outcomes: Sequence[bool], reason: str) -> None:
        """The call has really returned: its pages are free to be used. One outcome a key.

        ``reason`` is what those that failed are counted by. Outcomes that come too late are
        ignored.
        """
        assert len(outcomes) == call.num_keys
        with self._lock:
            self._lane(call.kind).calls.remove(call)
            offset = 0
            for part in call.parts:
                operation, length = part.operation, part.stop - part.start
                operation.num_calls -= 1
                if not call.is_given_up:
                    good = outcomes[offset : offset + length]
                    operation.outcomes[part.start : part.stop] = good
                    self._resolve(operation, length, reason, num_good=sum(good))
                elif operation.is_finished and not operation.num_calls:
                    self._give_back(operation)
                offset += length

    # ------------------------------------------------------------ events

    def emit(self, event: Event) -> None:
        """Pass on an event."""
        with self._lock:
            self._outbox.append(event)
            self._wake.set()

    def drain(self) -> list[Event]:
        """Return the events since the last time, in order."""
        if not self._outbox:
            return []
        with self._lock:
            events, self._outbox = self._outbox, []
            return events

    def wait_for_writes(self, timeout_s: float | None) -> bool:
        """Block until the writes submitted so far are finished; whether they are.

        While calls are paused, only stores are waited for.
        """
        with self._lock:
            writes = list(self._writes)
            return self._over.wait_for(
                lambda: all(
                    write.is_finished or (self._is_paused and write.kind != "store")
                    for write in writes
                ),
                timeout_s,
            )

    # ------------------------------------------------------------ inspection

    @property
    def num_queued(self) -> dict[Kind, int]:
        """Keys that wait, by kind."""
        with self._lock:
            return dict(self._num_queued)

    @property
    def num_dropped(self) -> dict[tuple[Kind, str], int]:
        """Keys that came to nothing, by kind and reason; misses are not among them."""
        with self._lock:
            return dict(self._num_dropped)

    @property
    def num_missed(self) -> dict[Kind, int]:
        """Keys that storage was asked for and did not have, by kind."""
        with self._lock:
            return dict(self._num_missed)

    @property
    def num_lent(self) -> int:
        """Pages of the pool in calls that have not returned."""
        with self._lock:
            return self._read.num_lent + self._write.num_lent

    @property
    def num_overdue(self) -> int:
        """Pages of the pool in calls that were given up and have not returned."""
        with self._lock:
            return self._read.num_overdue + self._write.num_overdue

    def calls(self) -> list[Call]:
        """Return the calls that have not returned, given up or not."""
        with self._lock:
            return [*self._read.calls, *self._write.calls]

    def check(self) -> None:
        """Assert the invariants at the top of this file. O(everything)."""
        with self._lock:
            self._check_operations()
            writable: set[int] = set()
            readable: set[int] = set()
            for call in self.calls():
                slots = set(call.slots)
                assert writable.isdisjoint(slots)
                assert len(slots) == call.num_lent or call.kind != "fetch"
                (writable if call.kind == "fetch" else readable).update(slots)
            assert writable.isdisjoint(readable)
            for lane in (self._read, self._write):
                assert lane.num_lent <= lane.max_lent
                assert len(lane.running) <= self._max_calls

    # ------------------------------------------------------------ helpers, under the lock

    def _lane(self, kind: Kind) -> Lane:
        return self._read if kind in _READS else self._write

    def _room(self, kind: Kind) -> tuple[int, str]:
        """Return how many more keys may be queued, and why no more."""
        if reasons := self._refusals[kind]:
            return 0, reasons[0]
        lane = self._lane(kind)
        if kind in ("fetch", "store") and lane.num_overdue >= lane.max_lent:
            return 0, "lent"
        most = self._max_queued if kind in AWAITED else _MAX_QUEUED_KEYS
        return most - self._num_queued[kind], "queue_full"

    def _next_parts(self, lane: Lane, queue: deque[Operation]) -> list[Part]:
        """Take keys of one kind from the head of a queue, as many as one call may have now."""
        while queue and not queue[0].num_queued:
            queue.popleft()
        running = lane.running
        if not queue or len(running) >= self._max_calls:
            return []
        kind = queue[0].kind
        # A delete runs alone, or a store beside it could bring back what it removes.
        if running and (kind == "delete" or any(call.kind == "delete" for call in running)):
            return []
        room = 1 if kind == "describe" else self._max_batch
        if kind in ("fetch", "store"):
            room = min(room, lane.max_lent - lane.num_lent)
        parts: list[Part] = []
        for operation in queue:
            if operation.kind != kind or room <= 0:
                break
            stop = min(operation.stop, operation.start + room)
            if stop > operation.start:
                parts.append(Part(operation, operation.start, stop))
            room -= stop - operation.start
        return parts

    def _start(self, lane: Lane, parts: list[Part], now: float) -> Call:
        call = Call(parts[0].operation.kind, parts, now, now + self._deadline_s)
        self._num_queued[call.kind] -= call.num_keys
        for part in parts:
            part.operation.start = part.stop
            part.operation.num_calls += 1
        lane.calls.add(call)
        return call

    def _unqueue(self, operation: Operation, reason: str) -> None:
        length = operation.num_queued
        self._num_queued[operation.kind] -= length
        operation.stop = operation.start
        if length:
            self._resolve(operation, length, reason)

    def _drop_queued(self, kind: Kind, reason: str) -> None:
        lane = self._lane(kind)
        for operation in [*lane.urgent, *lane.queue]:
            if operation.kind == kind:
                self._unqueue(operation, reason)

    def _resolve(self, operation: Operation, length: int, reason: str, num_good: int = 0) -> None:
        """Settle ``length`` more keys of an operation, and end it when they were the last."""
        operation.num_resolved += length
        if length > num_good and reason == MISSED:
            self._num_missed[operation.kind] += length - num_good
        elif length > num_good:
            self._num_dropped[operation.kind, reason] += length - num_good
        if operation.num_resolved < len(operation.keys):
            return
        assert not operation.is_finished
        operation.is_finished = True
        if operation in self._writes:
            self._writes.remove(operation)
            self._over.notify_all()
        if operation.op is None:
            return
        outcomes = tuple(operation.outcomes)
        if operation.kind == "probe":
            del self._awaited[operation.op]
            self.emit(Probed(operation.op, outcomes))
            return
        is_returned = not operation.num_calls
        if is_returned:
            del self._awaited[operation.op]
        seconds = self._clock() - operation.asked
        self.emit(Finished(operation.op, outcomes, is_returned, seconds=seconds))

    def _give_back(self, operation: Operation) -> None:
        """The last call of an operation that ended before its calls did has returned."""
        if operation.op is not None and operation.kind != "probe":
            del self._awaited[operation.op]
            self.emit(Returned(operation.op))

    def _check_operations(self) -> None:
        num_running: Counter[Operation] = Counter()
        for call in self.calls():
            for part in call.parts:
                num_running[part.operation] += 0 if call.is_given_up else part.stop - part.start
        queued = [*self._read.urgent, *self._read.queue, *self._write.queue]
        for operation in {*queued, *self._awaited.values(), *self._writes, *num_running}:
            settled = operation.num_resolved + operation.num_queued + num_running[operation]
            assert settled == len(operation.keys) == len(operation.outcomes)
        for kind in KINDS:
            of_kind = [o.num_queued for o in queued if o.kind == kind]
            assert sum(of_kind) == self._num_queued[kind]
