"""The process of ``hicache demo`` that runs the model: a line of JSON in, a line of JSON out.

``{"open": {name: setting}, "with_cache": bool}`` starts an engine, or another one on the same
model; ``{"messages": [...]}`` or ``{"prompt_ids": [...]}`` with ``"max_tokens"`` asks it. The end
of stdin ends it, once all is written down. What cannot be done is told in one line,
``{"error": ...}``, and ends it too.
"""

import json
import sys
import time
from typing import Any, TextIO

from hicache.config import load
from hicache.engine.engine import Engine
from hicache.engine.model import LoadedModel
from hicache.engine.opening import open_hicache
from hicache.engine.uncached import PrivatePages
from hicache.errors import HiCacheError
from hicache.tools.turns import greedy, take_turn

SETTLE_S = 10.0
"""How long the pause after a turn may be, in which it is written down."""


class Worker:
    """One engine at a time, on a model that is loaded once."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._model: LoadedModel | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request; raise ``HiCacheError`` where there is none."""
        if "open" in request:
            return self._open(request["open"], with_cache=request["with_cache"])
        assert self._engine is not None
        return self._ask(self._engine, request)

    def close(self) -> None:
        """Write down what is dirty, and end the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _open(self, settings: dict[str, object], *, with_cache: bool) -> dict[str, Any]:
        self.close()
        config = load(environ={}, overrides=settings)
        opener = open_hicache if with_cache else PrivatePages.open
        self._engine = Engine(config, self._model, open_cache=opener)
        self._model = self._engine.model
        return {"cache": self._engine.cache.describe()}

    def _ask(self, engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
        prompt_ids = request.get("prompt_ids")
        if prompt_ids is None:
            prompt_ids = engine.model.template.render(request["messages"])
        turn = take_turn(engine, prompt_ids, greedy(request["max_tokens"], to_the_end=False))
        _settle(engine)
        return {
            "prompt_ids": prompt_ids,
            "token_ids": turn.token_ids,
            "text": engine.model.decode(turn.token_ids),
            "hit_tokens": [turn.hit.device, turn.hit.host, turn.hit.storage],
            "ttft_s": turn.ttft_s,
        }


def serve(requests: TextIO, answers: TextIO) -> int:
    """Answer requests to their end; return the exit code."""
    worker = Worker()
    try:
        for line in requests:
            print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)
        worker.close()
    except HiCacheError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return 2
    finally:
        worker.close()
    return 0


def _settle(engine: Engine) -> None:
    """Wait until what a turn has left to copy and to store is done, as it is while people type."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        stats = engine.cache.stats()
        if stats is None or not stats.num_operations:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(serve(sys.stdin, sys.stdout))
