"""``hicache backends check``: whether a backend keeps the contract, check by check, in words.

Works for any backend that can be imported, and without a test framework.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from hicache import plugins
from hicache.errors import ConfigError
from hicache.storage import StorageBackend
from hicache.testing.running import TIMEOUT_S, Outcome, run_checks
from hicache.tools.report import open_console, write_json

_MARKS = {"passed": "[green]pass[/green]", "failed": "[bold red]FAIL[/bold red]", "skipped": "skip"}


def run(
    spec: str,
    options: Sequence[str] = (),
    folder: Path | None = None,
    json_path: Path | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Run every check and print how it went; 0 if all passed, 1 if not.

    Raises ``HiCacheError`` where the backend cannot be made or opened, or its store is not empty.
    """
    given = _options(options)
    if ":" in spec and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where the author of a backend is, before it is a package
    kind = plugins.backend_class(spec)

    def make(path: Path, budget_nbytes: int) -> StorageBackend:
        return plugins.make_backend(spec, given, path=path, budget_nbytes=budget_nbytes)

    console = open_console()
    outcomes: list[Outcome] = []
    with _scratch(folder) as scratch:
        for outcome in run_checks(kind, make, scratch, timeout_s=timeout_s):
            outcomes.append(outcome)
            _print(console, outcome)
    num_failed = sum(outcome.status == "failed" for outcome in outcomes)
    num_skipped = sum(outcome.status == "skipped" for outcome in outcomes)
    num_passed = len(outcomes) - num_failed - num_skipped
    console.print(
        f"{escape(spec)}: {num_passed} passed, {num_failed} failed, {num_skipped} skipped",
        highlight=False,
    )
    if json_path is not None:
        write_json(json_path, {"backend": spec, "checks": [_as_json(one) for one in outcomes]})
    if any(outcome.is_running for outcome in outcomes):
        _leave(1)
    return 1 if num_failed else 0


def _options(texts: Sequence[str]) -> dict[str, object]:
    """Return ``name=value`` texts as the options of a backend, whose model reads the values."""
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"command line: --option {text}: write --option NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """Give a new directory, in ``folder`` if one is named; remove it at the end."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(
            prefix="hicache-check-", dir=folder, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    with made as name:
        yield Path(name)


def _print(console: Console, outcome: Outcome) -> None:
    lines = [f"{_MARKS[outcome.status]}  {escape(outcome.check.title)}"]
    if outcome.status == "skipped":
        lines[0] += f": {escape(outcome.happened)}"
    if outcome.status == "failed":
        lines.append(f"        promise:  {escape(outcome.check.promise)}")
        lines.append(f"        expected: {escape(outcome.expected)}")
        lines.append(f"        happened: {escape(outcome.happened)}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _as_json(outcome: Outcome) -> dict[str, str]:
    return {
        "name": outcome.check.name,
        "promise": outcome.check.promise,
        "status": outcome.status,
        "expected": outcome.expected,
        "happened": outcome.happened,
    }


def _leave(code: int) -> None:
    """End the process without waiting for the threads of a backend that hangs."""
    print("hicache: a call of the backend never returned: not waiting for it", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
