"""Runs the checks on a backend without a test framework, each on a store of its own.

Each check has a thread and an event loop, so that a backend that blocks or hangs fails its check
and no other.
"""

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hicache.errors import ConfigError, HiCacheError
from hicache.storage import StorageBackend
from hicache.testing.checks import CHECKS, Check
from hicache.testing.checks.budget import BUDGET_NBYTES
from hicache.testing.expecting import CheckFailed, expect
from hicache.testing.records import Subject

ROOMY_NBYTES = 256 * 1024 * 1024
TIMEOUT_S = 60.0

Make = Callable[[Path, int], StorageBackend]
"""Makes a backend on the store in a directory, with a budget; the same store for the same path."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one check went."""

    check: Check
    status: Literal["passed", "failed", "skipped"]
    expected: str = ""
    happened: str = ""
    """What was found instead, or why the check was skipped."""
    is_running: bool = False
    """Whether a call of the backend never returned: its thread is still there."""


def run_checks(
    kind: type[StorageBackend],
    make: Make,
    folder: Path,
    *,
    checks: list[Check] = CHECKS,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Outcome]:
    """Yield how each check went, as it ends. Stores are made in ``folder``, one a check.

    Raises ``ConfigError`` where a store that should be empty is not, before anything is put.
    """
    _expect_empty(make, folder / "first" / "store")
    for number, check in enumerate(checks):
        reason = _why_not(check, kind)
        if reason is not None:
            yield Outcome(check, "skipped", happened=reason)
            continue
        yield _run_one(check, make, folder / f"{number:02}" / "store", timeout_s)
    with suppress(Exception):  # which a check has told already
        asyncio.run(_clear(make, folder / "last" / "store"))


def _why_not(check: Check, kind: type[StorageBackend]) -> str | None:
    if check.needs == "reopen" and not kind.outlives_process:
        return "the backend says that its records end with the process (outlives_process)"
    if check.needs == "bounded" and not kind.evicts_itself:
        return "the backend does not say that it keeps to a budget (evicts_itself)"
    return None


def _expect_empty(make: Make, path: Path) -> None:
    """Open a store once; raise ``ConfigError`` where that fails, or it holds records."""

    async def count() -> int:
        async with make(path, ROOMY_NBYTES) as backend:
            return (await backend.stats()).num_records

    held = 0
    try:
        held = asyncio.run(count())
    except HiCacheError:
        raise
    except Exception as error:
        raise ConfigError(f"the backend cannot be opened: {_told(error)}") from error
    if held:
        raise ConfigError(f"the store holds {held} records: the checks need one that is empty")


def _run_one(check: Check, make: Make, path: Path, timeout_s: float) -> Outcome:
    ended: list[Outcome] = []

    def work() -> None:
        ended.append(_tried(check, make, path))

    thread = threading.Thread(target=work, name=f"hicache-check-{check.name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if ended:
        return ended[0]
    happened = f"it had not ended after {timeout_s:g} s"
    return Outcome(check, "failed", "the check ends", happened, is_running=True)


def _tried(check: Check, make: Make, path: Path) -> Outcome:
    """Run a check to its end; whatever the backend raises is what happened."""

    async def ending() -> BaseException | None:
        [ended] = await asyncio.gather(_try(check, make, path), return_exceptions=True)
        return ended

    error = asyncio.run(ending())
    if error is None:
        return Outcome(check, "passed")
    if isinstance(error, CheckFailed):
        return Outcome(check, "failed", error.expected, f"{error.what}: {error.found}")
    return Outcome(check, "failed", "no exception", _told(error))


async def _try(check: Check, make: Make, path: Path) -> None:
    budget_nbytes = BUDGET_NBYTES if check.needs == "bounded" else ROOMY_NBYTES
    backend = make(path, budget_nbytes)
    expect("files that were there before open", int(path.exists()), 0)
    await backend.open([])

    async def reopened() -> StorageBackend:
        again = make(path, budget_nbytes)
        await again.open([])
        return again

    store = Subject(backend, reopened)
    try:
        await _remove_all(store.backend)
        await check.run(store)
    finally:
        await store.backend.close()


async def _clear(make: Make, path: Path) -> None:
    async with make(path, ROOMY_NBYTES) as backend:
        await _remove_all(backend)


async def _remove_all(backend: StorageBackend) -> None:
    """Remove what an earlier check has left, where all of them use one store."""
    if (await backend.stats()).num_records:
        keys = [key async for key, _ in backend.scan(0)]
        for start in range(0, len(keys), backend.max_batch):
            await backend.delete(keys[start : start + backend.max_batch])


def _told(error: BaseException) -> str:
    """Return an exception in one line, with the line of the backend that raised it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    if not theirs:
        return text
    return f"{text} ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})"
