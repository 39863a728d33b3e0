"""Our backends and a few wrong ones, against hypothesis: calls that nobody thought of."""

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

from hicache.backends.file import FileBackend
from hicache.backends.lmdb import LmdbBackend
from hicache.backends.memory import MemoryBackend
from hicache.keys import KEY_NBYTES, PageKey
from hicache.storage import StorageBackend
from hicache.testing import BackendMachine, FaultyBackend, strategies
from hicache.testing.expecting import CheckFailed
from hicache.testing.faulty import Chances
from tests.wrong_backends import LosesOnReopen

MIB = 1024 * 1024


class FileMachine(BackendMachine):
    def make(self, path: Path) -> StorageBackend:
        return FileBackend(path, 64 * MIB)


class SmallFileMachine(BackendMachine):
    may_evict: ClassVar[bool] = True

    def make(self, path: Path) -> StorageBackend:
        return FileBackend(path, 8 * MIB)


class LmdbMachine(BackendMachine):
    def make(self, path: Path) -> StorageBackend:
        return LmdbBackend(path, 64 * MIB)


class SmallLmdbMachine(BackendMachine):
    may_evict: ClassVar[bool] = True

    def make(self, path: Path) -> StorageBackend:
        return LmdbBackend(path, 8 * MIB)


class MemoryMachine(BackendMachine):
    outlives_process: ClassVar[bool] = False

    def make(self, path: Path) -> StorageBackend:
        return FaultyBackend(MemoryBackend(), chances=Chances(delayed=0.3))


OURS = pytest.mark.parametrize(
    "machine", [FileMachine, SmallFileMachine, LmdbMachine, SmallLmdbMachine, MemoryMachine]
)


@pytest.mark.slow
@OURS
def test_our_backends_agree_with_a_dict(machine: type[BackendMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=6, stateful_step_count=20))


@pytest.mark.soak
@OURS
def test_our_backends_agree_with_a_dict_for_long(
    machine: type[BackendMachine], is_full: bool
) -> None:
    num_runs = 300 if is_full else 6
    run_state_machine_as_test(
        machine, settings=settings(max_examples=num_runs, stateful_step_count=50)
    )


class WrongMachine(BackendMachine):
    def make(self, path: Path) -> StorageBackend:
        return LosesOnReopen(path, 8 * MIB)


@pytest.mark.slow
def test_hypothesis_finds_what_is_wrong() -> None:
    quick = settings(max_examples=60, phases=[Phase.generate], report_multiple_bugs=False)

    with pytest.raises(CheckFailed):
        run_state_machine_as_test(WrongMachine, settings=quick)


@given(strategies.keys(), strategies.batches(), strategies.parts(), strategies.chances())
@settings(max_examples=20)
def test_what_the_strategies_give_fits_the_contract(
    key: PageKey, batch: dict[PageKey, bytes], parts: list[bytes], chances: Chances
) -> None:
    assert len(key) == KEY_NBYTES
    assert all(len(one) == KEY_NBYTES for one in batch)
    assert sum(map(len, parts)) <= 10_000
    assert chances.hung == 0
