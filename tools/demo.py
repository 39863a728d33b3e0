"""``hicache demo``: chats that outgrow L1 and L2, a restart, and the same without a cache.

This process only asks and shows. The model runs in another, which ends in the middle: what the
next one knows of the chats it has from disk.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from hicache.actions import HitTokens
from hicache.errors import InputError
from hicache.machine import num_cpus
from hicache.tools.demo_process import WorkerProcess
from hicache.tools.demo_results import Results, Turn
from hicache.tools.demo_script import (
    LINES,
    LINES_AFTER_RESTART,
    MAX_ANSWER_TOKENS,
    SETTINGS,
    SYSTEM,
    Line,
)
from hicache.tools.demo_view import View, open_view_console
from hicache.tools.report import write_json

CHATTING = (
    "1 of 3, chats that outgrow L1 and L2",
    "Four chats share a system prompt, and L1 and L2 have room for two. "
    "Watch a chat move down while it pauses, and come back.",
)
RESUMING = (
    "2 of 3, after a restart",
    "The process has ended. A new one takes every chat up again: "
    "what it does not compute, it reads from disk, at most as much at a time as L2 holds.",
)
COMPUTING = (
    "3 of 3, without a cache",
    "The same turns again: every prompt is computed whole. = says that the same tokens came out.",
)


def run(
    json_path: Path | None = None,
    *,
    keep: Path | None = None,
    settings: Mapping[str, object] | None = None,
) -> int:
    """Run the demo and return its exit code: 1 if a token differs or a tier was never hit.

    The store is kept in ``keep``, where given. ``settings`` go over those of the script.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError("torch is missing", name="torch")
    results = Results()
    with _store_directory(keep) as path, View(results, open_view_console()) as view:
        own = {"cache.storage.path": str(path), "engine.num_threads": min(2, num_cpus())}
        _Demo(results, view, {**SETTINGS, **own, **(settings or {})}).play()
        view.conclude()
    if json_path is not None:
        write_json(json_path, results.as_json())
    return 1 if results.problems() else 0


class _Demo:
    """The three acts."""

    def __init__(self, results: Results, view: View, settings: Mapping[str, object]) -> None:
        self._results = results
        self._view = view
        self._settings = settings
        self._chats: dict[str, list[dict[str, str]]] = {}

    def play(self) -> None:
        """Play them."""
        view = self._view
        view.explain(*CHATTING)
        with self._process() as process:
            self._open(process, with_cache=True)
            self._chat(process, LINES)
            view.wait_for("The first process writes down what is not on disk yet, and ends")
            process.close()
        view.explain(*RESUMING)
        with self._process() as process:
            self._open(process, with_cache=True)
            self._chat(process, LINES_AFTER_RESTART)
            view.explain(*COMPUTING)
            self._open(process, with_cache=False)
            self._compute(process)
            view.wait_for("")

    def _process(self) -> WorkerProcess:
        return WorkerProcess(self._view.note)

    def _open(self, process: WorkerProcess, *, with_cache: bool) -> None:
        self._view.wait_for("The model is being loaded" if with_cache else "The cache is closed")
        process.ask({"open": self._settings, "with_cache": with_cache})

    def _chat(self, process: WorkerProcess, lines: Sequence[Line]) -> None:
        for line in lines:
            self._view.wait_for(f"{line.chat}: {line.text.split('. ')[-1]}")
            messages = self._chats.setdefault(line.chat, [{"role": "system", "content": SYSTEM}])
            messages.append({"role": "user", "content": line.text})
            answer = process.ask({"messages": messages, "max_tokens": MAX_ANSWER_TOKENS})
            messages.append({"role": "assistant", "content": answer["text"]})
            turn = Turn(
                chat=line.chat,
                question=line.text.split(". ")[-1],
                answer=answer["text"],
                prompt_ids=answer["prompt_ids"],
                token_ids=answer["token_ids"],
                hit=HitTokens(*answer["hit_tokens"]),
                ttft_s=answer["ttft_s"],
                is_after_restart=lines is LINES_AFTER_RESTART,
            )
            self._results.turns.append(turn)
            self._view.answered(turn)

    def _compute(self, process: WorkerProcess) -> None:
        for turn in self._results.turns:
            self._view.wait_for(f"{turn.chat}, without a cache: {turn.question}")
            answer = process.ask({"prompt_ids": turn.prompt_ids, "max_tokens": MAX_ANSWER_TOKENS})
            turn.computed_token_ids = answer["token_ids"]
            turn.computed_ttft_s = answer["ttft_s"]
            self._view.answered(turn)


@contextmanager
def _store_directory(keep: Path | None) -> Iterator[Path]:
    """Yield where the store goes: a new directory that is removed, or an empty one that is not."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="hicache-demo-") as name:
            yield Path(name)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        is_empty = not any(keep.iterdir())
    except OSError as error:
        raise InputError(f"{keep}: {error.strerror}") from None
    if not is_empty:
        raise InputError(f"{keep}: the demo keeps its store in an empty directory only")
    yield keep
