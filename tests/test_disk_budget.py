"""A budget holds at every moment, whatever is done; and what is there is what was put."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.testing.conformance import key, read, record
from tests.disk_child import BACKENDS
from tests.disks import MIB, Disk, FakeClock

Verb = Literal["put", "delete", "touch", "wait", "reopen"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "put", "delete", "touch", "wait", "reopen"]),
        st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True),
    ),
    max_size=30,
)


def nbytes_of(name: int) -> int:
    """Return how long the record of a name is: from a few bytes to a tenth of the budget."""
    return (1, 700, 30_000, 120_000, 400_000)[name % 5] + name


async def perform(disk: Disk, steps: list[tuple[Verb, list[int]]]) -> None:
    """Do the steps, one opening after the other."""
    while steps:
        async with disk.opened() as backend:
            while steps:
                verb, names = steps.pop(0)
                keys = [key(name) for name in names]
                if verb == "put":
                    items = [(key(name), [record(name, nbytes_of(name))]) for name in names]
                    assert await backend.put(items) == [True] * len(names)
                    assert await read(backend, names[-1], 600_000) is not None
                elif verb == "delete":
                    await backend.delete(keys)
                    assert await backend.contains(keys) == [False] * len(keys)
                elif verb == "touch":
                    await backend.touch(keys)
                elif verb == "wait":
                    disk.clock.now += 60
                else:
                    break
                assert disk.nbytes() <= disk.budget_nbytes
            for name in range(41):
                found = await read(backend, name, 600_000)
                assert found in (None, record(name, nbytes_of(name)))


@pytest.mark.parametrize("kind", sorted(BACKENDS))
@settings(max_examples=40)
@given(steps=STEPS)
def test_a_budget_holds_whatever_is_done(kind: str, steps: list[tuple[Verb, list[int]]]) -> None:
    with TemporaryDirectory() as folder:
        disk = Disk(kind, Path(folder) / "store", FakeClock(), 4 * MIB)

        anyio.run(perform, disk, steps)
