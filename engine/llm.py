"""The engine from Python: ``LLM("smollm2").generate(["Once upon a time"])``."""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress

from hicache.cache.checking import check_storage
from hicache.config import Config, load
from hicache.engine.caching import OpenCache
from hicache.engine.completion import Completion
from hicache.engine.engine import Engine, QueueFull
from hicache.engine.generation import Generation
from hicache.engine.opening import open_hicache
from hicache.engine.outputs import SamplingParams
from hicache.errors import InputError

Prompt = str | list[int]
"""Text, or its tokens."""

Chat = Sequence[Mapping[str, object]]
"""Messages with ``role`` and ``content``."""

DEFAULT_PARAMS = SamplingParams()


class LLM:
    """A model with its cache, in this process. Close it, or use it in a ``with``."""

    def __init__(
        self,
        model: str | Path | None = None,
        config: Config | None = None,
        *,
        open_cache: OpenCache = open_hicache,
        shows_progress: bool = True,
    ) -> None:
        """Load a model: a directory, or ``smollm2``; ``None`` is what the settings say.

        A progress bar is shown only where stderr is a terminal.
        """
        if config is None:
            config = load(overrides={"engine.model": None if model is None else str(model)})
        elif model is not None:
            section = config.engine.model_copy(update={"model": str(model)})
            config = config.model_copy(update={"engine": section})
        if open_cache is open_hicache:
            check_storage(config.cache)
        self.engine = Engine(config, open_cache=open_cache)
        self._shows_progress = shows_progress and sys.stderr.isatty()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
        *,
        salt: str | None = None,
    ) -> list[Completion]:
        """Return one completion a prompt, in their order, whatever order they ended in.

        A completion that could not be computed says so in ``error``. Raises ``InputError`` for a
        prompt that cannot run; nothing runs on then.
        """
        encode = self.engine.model.encode
        ids = [encode(item) if isinstance(item, str) else item for item in _separate(prompts)]
        return self._run(ids, params, salt)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
        *,
        salt: str | None = None,
    ) -> list[Completion]:
        """Return the next turn of one chat, or of each."""
        chats: list[Chat] = []
        if messages and isinstance(messages[0], Mapping):
            chats.append([message for message in messages if isinstance(message, Mapping)])
        else:
            chats.extend(chat for chat in messages if not isinstance(chat, Mapping))
        return self._run([self.engine.model.template.render(chat) for chat in chats], params, salt)

    def close(self, timeout_s: float = 30.0) -> None:
        """End the engine; what is dirty is written down first."""
        self.engine.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        salt: str | None,
    ) -> list[Completion]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InputError(f"{len(each)} sampling parameters for {len(prompts)} prompts")
        completions: list[Completion] = []
        running: deque[Generation] = deque()
        console = Console(stderr=True)
        with Progress(console=console, disable=not self._shows_progress, transient=True) as bar:
            task = bar.add_task("generating", total=len(prompts))

            def finish_oldest() -> None:
                completions.append(Completion.of(running[0]))
                running.popleft()
                bar.advance(task)

            try:
                for prompt, own in zip(prompts, each, strict=True):
                    while (generation := self._try(prompt, own, salt, bool(running))) is None:
                        finish_oldest()
                    running.append(generation)
                while running:
                    finish_oldest()
            finally:
                for generation in running:
                    generation.abort()
        return completions

    def _try(
        self, prompt: Sequence[int], params: SamplingParams, salt: str | None, can_wait: bool
    ) -> Generation | None:
        """Submit a prompt; None where the queue is full, and waiting for our own may help."""
        try:
            return self.engine.submit(prompt, params, salt=salt)
        except QueueFull:
            if not can_wait:
                raise
            return None


def _separate(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts one by one, where it may be a single one."""
    if isinstance(prompts, str):
        return [prompts]
    single = [item for item in prompts if isinstance(item, int)]
    return [single] if single else [item for item in prompts if not isinstance(item, int)]
