"""A GPU of streams and events that runs as adversely as CUDA allows.

Work that a stream is given waits until ``run`` is called, which lets the streams go ahead in an
order of the test's choice, each as far as its events allow. So a fence that is missing shows as
wrong bytes, every time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hicache.transfer.runs import Run
from hicache.transfer.staging import Stretch, scatter_with_torch
from hicache.transfer.streams import Event, Stream

Fence = tuple[str, str]
"""Names of the stream that waits and of the stream that it waits for."""


@dataclass(eq=False)
class FakeEvent:
    """A point in the work of a stream."""

    recorder: "FakeStream"
    is_passed: bool = False

    def query(self) -> bool:
        self.recorder.gpu.fail_if_broken()
        return self.is_passed


@dataclass(eq=False)
class FakeStream:
    """A queue of work; an event in it is waited for or recorded."""

    gpu: "FakeGpu"
    name: str
    work: deque[Callable[[], bool]] = field(default_factory=deque)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.gpu.waits.append((self.name, event.recorder.name))
        if (self.name, event.recorder.name) not in self.gpu.missing:
            self.work.append(lambda: event.is_passed)

    def record_event(self) -> FakeEvent:
        self.gpu.fail_if_broken()
        event = FakeEvent(self)

        def record() -> bool:
            event.is_passed = True
            return True

        self.work.append(record)
        return event

    def synchronize(self) -> None:
        self.gpu.num_synchronized += 1
        self.gpu.fail_if_broken()
        self.gpu.run()

    def step(self) -> bool:
        """Do the next piece of work, if it may go ahead."""
        if not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True


class FakeGpu:
    """Streams of a GPU; the first is ``compute``, then ``load``, ``back_up`` and ``page``."""

    def __init__(self, missing: frozenset[Fence] = frozenset()) -> None:
        self.missing = missing
        """Fences that are left out, to see that they are needed."""
        self.is_broken = False
        self.copies_rows = True
        self.launches: list[list[int]] = []
        """Pages of each copy, in each call."""
        self.stretches: list[int] = []
        """Pages of each stretch."""
        self.num_synchronized = 0
        self.copies_until_failure: int | None = None
        self.waits: list[Fence] = []
        """Who waited for whom, in the order in which it was asked for."""
        self.log: list[str] = []
        """What the streams did, by name of the stream or of the computation."""
        self.streams = {"compute": FakeStream(self, "compute")}
        self._current = self.streams["compute"]
        self._used = self._current

    def fail_if_broken(self) -> None:
        """Raise what a GPU raises at every call after it has failed."""
        if self.is_broken:
            raise RuntimeError("unspecified launch failure")

    def current(self) -> Stream:
        return self._current

    def stream(self) -> Stream:
        name = next(name for name in ("load", "back_up", "page") if name not in self.streams)
        return self.streams.setdefault(name, FakeStream(self, name))

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, FakeStream)
        before, self._used = self._used, stream
        try:
            yield
        finally:
            self._used = before

    @contextmanager
    def computing_in(self, name: str) -> Iterator[None]:
        """Compute in another stream meanwhile."""
        before, self._current = self._current, self.streams.setdefault(name, FakeStream(self, name))
        yield
        self._current = before

    def seconds_between(self, begin: Event, end: Event) -> float:
        assert begin.query()
        assert end.query()
        return 0.001

    def copy(self, target: Tensor, source: Tensor, chosen: Sequence[Run], part: slice) -> None:
        self.launches.append([run.length for run in chosen])
        for from_slot, to_slot, length in chosen:
            is_whole = part == slice(0, target.shape[1])
            assert is_whole or self.copies_rows or length == 1
            if self.copies_until_failure is not None:
                self.copies_until_failure -= 1
                if self.copies_until_failure < 0:
                    raise RuntimeError("invalid argument")
            rows = source[from_slot : from_slot + length, part]
            into = target[to_slot : to_slot + length, part]
            self._give(self._used, self._used.name, partial(into.copy_, rows))

    def copy_stretch(
        self, target: Tensor, source: Tensor, stretch: Stretch, part: slice, buffer: Tensor
    ) -> None:
        num_pages, width = len(stretch.targets), part.stop - part.start
        self.stretches.append(num_pages)
        rows = buffer[: num_pages * width].view(num_pages, width)
        neighbours = source[stretch.source : stretch.source + num_pages, part]
        slots = torch.tensor(stretch.targets, dtype=torch.int32)
        self._give(self._used, self._used.name, partial(rows.copy_, neighbours))
        scatter = partial(scatter_with_torch, target, rows, slots, part.start)
        self._give(self._used, self._used.name, scatter)

    def launch(self, name: str, computation: Callable[[], object]) -> None:
        """Give a computation to the current stream."""
        self._give(self._current, name, computation)

    def run(self, *first: str) -> None:
        """Run everything; whenever several streams could go ahead, the earliest named does."""
        order = [*first, *(name for name in self.streams if name not in first)]
        while any(self.streams[name].step() for name in order):
            pass
        stuck = [name for name in order if self.streams[name].work]
        assert not stuck, f"streams wait for each other: {stuck}"

    def step(self, name: str, times: int) -> None:
        """Let one stream do at most so much work."""
        for _ in range(times):
            self.streams[name].step()

    def _give(self, stream: FakeStream, name: str, work: Callable[[], object]) -> None:
        def do() -> bool:
            work()
            self.log.append(name)
            return True

        stream.work.append(do)
