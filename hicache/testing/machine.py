"""A state machine to subclass: hypothesis looks for calls after which a backend is wrong.

::

    class MyMachine(BackendMachine):
        def make(self, path: Path) -> StorageBackend:
            return MyBackend(path)

    TestMyMachine = MyMachine.TestCase
"""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.storage import StorageBackend
from hicache.testing.model import MANY_NAMES, NAMES, Model
from hicache.testing.records import Subject

SOME_NAMES = st.lists(st.sampled_from(NAMES), max_size=6)
TURNS = st.integers(0, 6)


class BackendMachine(RuleBasedStateMachine):
    """Random calls, each compared with a dict. Override ``make``, and what differs of the rest."""

    may_evict: ClassVar[bool] = False
    """Whether records may go by themselves, because there is a budget: 8 MiB is a good one."""
    outlives_process: ClassVar[bool] = True
    """Whether records are there when the store is opened anew."""

    def make(self, path: Path) -> StorageBackend:
        """Return a backend that is not open, on the store in ``path``: the same one each time."""
        raise NotImplementedError("return a backend that is not open, on the store in path")

    def __init__(self) -> None:
        super().__init__()
        self._path = Path(tempfile.mkdtemp(prefix="hicache-machine-"))
        self._runner = asyncio.Runner()
        backend = self._run(self._opened())
        self._model = Model(Subject(backend, self._reopened), may_evict=self.may_evict)

    @rule(names=SOME_NAMES)
    def put(self, names: list[int]) -> None:
        self._run(self._model.put(names))

    @rule(names=SOME_NAMES)
    def get(self, names: list[int]) -> None:
        self._run(self._model.get(names))

    @rule(names=SOME_NAMES)
    def contains(self, names: list[int]) -> None:
        self._run(self._model.contains(names))

    @rule(names=SOME_NAMES)
    def delete(self, names: list[int]) -> None:
        self._run(self._model.delete(names))

    @rule(names=SOME_NAMES)
    def touch(self, names: list[int]) -> None:
        self._run(self._model.touch(names))

    @rule()
    def scan(self) -> None:
        self._run(self._model.scan())

    @rule()
    def stats(self) -> None:
        self._run(self._model.stats())

    @precondition(lambda self: self.outlives_process)
    @rule()
    def reopen(self) -> None:
        self._run(self._model.reopen())

    @rule(names=SOME_NAMES, num_turns=TURNS)
    def cancel_a_get(self, names: list[int], num_turns: int) -> None:
        self._run(self._model.cancelled_get(names, num_turns))

    @rule(names=SOME_NAMES, num_turns=TURNS)
    def cancel_a_put(self, names: list[int], num_turns: int) -> None:
        self._run(self._model.cancelled_put(names, num_turns))

    @invariant()
    def nobody_writes_to_what_was_given_back(self) -> None:
        self._model.check()

    def teardown(self) -> None:
        try:
            self._run(self._model.get(NAMES))
            self._run(self._model.store.backend.close())
        finally:
            self._runner.close()
            shutil.rmtree(self._path, ignore_errors=True)

    @precondition(lambda self: self.may_evict)
    @rule(first=st.sampled_from(MANY_NAMES[::60]))
    def put_many(self, first: int) -> None:
        for start in range(first, first + 60, 6):
            self.put(list(range(start, start + 6)))

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(call)

    async def _opened(self) -> StorageBackend:
        backend = self.make(self._path)
        await backend.open([])
        return backend

    async def _reopened(self) -> StorageBackend:
        await self._model.store.backend.close()
        return await self._opened()
