"""Copies that go into one stream in the order in which they are asked for, as it has room.

A stream takes about 1,000 launches; the next one blocks the thread. So a lane keeps what its
stream has no room for, and puts it there when it is looked after (``advance``), or when the
computation is about to wait for it (``arrival``).
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hicache.events import OpId
from hicache.transfer.streams import Event, Streams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Some copies of one layer group, put into the stream together."""

    num_pieces: int
    """Launches that it takes."""
    put: Callable[[], None]
    """Puts them into the stream in use; raises ``RuntimeError`` where that fails half-way."""
    ends_group: bool
    """Whether nothing of its layer group follows."""


@dataclass(slots=True, eq=False)
class Copy:
    """A copy that was asked for."""

    op: OpId
    num_pages: int
    num_groups: int
    """Layer groups of its parts."""
    behind: Sequence[Event]
    """What it must not overtake."""
    parts: Iterator[Part]
    """What is not in the stream yet, layer group by layer group."""
    begun: Event | None = None
    """Before everything."""
    arrived: list[Event] = field(default_factory=list)
    """Behind each layer group; of a copy that failed only one, behind whatever was started."""
    is_put: bool = False
    """Whether nothing is left to be put into the stream."""
    is_whole: bool = True
    """Whether all that was tried could be put there."""


class Lane:
    """One stream, and what waits to go into it. First come, first served."""

    def __init__(self, streams: Streams, max_pieces: int) -> None:
        """``max_pieces`` launches are in the stream at once, and those of one part more."""
        self.num_waiting_pages = 0
        """Of copies that are not in the stream, or not wholly."""
        self._streams = streams
        self._stream = streams.stream()
        self._max_pieces = max_pieces
        self._waiting: deque[Copy] = deque()
        self._running: deque[Copy] = deque()
        self._in_flight: deque[tuple[Event, int]] = deque()
        self._num_in_flight = 0

    def ask(self, copy: Copy) -> None:
        """Queue a copy."""
        self._waiting.append(copy)
        self.num_waiting_pages += copy.num_pages
        self.advance()

    def advance(self) -> None:
        """Put what waits into the stream, as far as it has room."""
        while self._waiting and self._has_room():
            self._put_next()

    def arrival(self, copy: Copy, group: int) -> Event | None:
        """Return the event behind a layer group of a copy; ``None`` if nothing was started.

        What is before it and has waited is put into the stream, whether it has room or not: the
        computation would have to wait for it anyway.
        """
        while not copy.is_put and len(copy.arrived) <= group:
            self._put_next()
        return copy.arrived[min(group, len(copy.arrived) - 1)] if copy.arrived else None

    def over(self) -> Iterator[tuple[Copy, bool]]:
        """Yield the copies that are over since the last call, and whether they succeeded."""
        while self._running and (outcome := _outcome(self._running[0])) is not None:
            yield self._running.popleft(), outcome

    def finish(self) -> None:
        """Put everything into the stream, and wait until it is over."""
        while self._waiting:
            self._put_next()
        try:
            self._stream.synchronize()
        except RuntimeError:
            logger.exception("the GPU failed; its copies are over")

    def _has_room(self) -> bool:
        while self._in_flight and _has_passed(self._in_flight[0][0]):
            self._num_in_flight -= self._in_flight.popleft()[1]
        return self._num_in_flight < self._max_pieces

    def _put_next(self) -> None:
        """Put the next part into the stream, with an event behind it.

        What fails half-way is over when that half is: its slots are written to until then.
        """
        copy = self._waiting[0]
        try:
            self._put(copy)
        except RuntimeError:
            logger.exception("a copy of %d pages could not be started", copy.num_pages)
            copy.is_put, copy.is_whole = True, False
            copy.arrived = self._event_behind_all()
        if copy.is_put:
            self.num_waiting_pages -= copy.num_pages
            self._running.append(self._waiting.popleft())

    def _put(self, copy: Copy) -> None:
        """Put the next part of a copy into the stream."""
        if copy.begun is None:
            for event in copy.behind:
                self._stream.wait_event(event)
            copy.begun = self._stream.record_event()
        part = next(copy.parts, None)
        if part is None:  # a copy of no pages
            copy.arrived.append(self._stream.record_event())
            copy.is_put = True
            return
        with self._streams.use(self._stream):
            part.put()
        event = self._stream.record_event()
        self._in_flight.append((event, part.num_pieces))
        self._num_in_flight += part.num_pieces
        if part.ends_group:
            copy.arrived.append(event)
            copy.is_put = len(copy.arrived) == copy.num_groups

    def _event_behind_all(self) -> list[Event]:
        try:
            return [self._stream.record_event()]
        except RuntimeError:
            logger.exception("the GPU failed; its copies are over")
            return []


def _outcome(copy: Copy) -> bool | None:
    """Return how a copy ended, or ``None`` while it runs."""
    if not copy.arrived:
        return False
    try:
        return copy.is_whole if copy.arrived[-1].query() else None
    except RuntimeError:
        logger.exception("a copy of %d pages failed", copy.num_pages)
        return False


def _has_passed(event: Event) -> bool:
    try:
        return event.query()
    except RuntimeError:
        return True  # ``over`` says what failed
