"""The other end of ``hicache.tools.demo_worker``: starts that process, asks it, ends it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from hicache.errors import HiCacheError

WORKER = "hicache.tools.demo_worker"

QUIET = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""No weights from a hub; and threads that wait do not take the cores from those that work.
Torch reads these once, when it is loaded."""


class WorkerProcess:
    """A process with a model. Use it in a ``with``: it ends with that, whatever happens."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """Start it; lines that it writes to stderr are told to ``note``, from a thread."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **QUIET},
        )
        self._notes = threading.Thread(target=self._pass_on, args=(note,), daemon=True)
        self._notes.start()

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return its answer; raise ``HiCacheError`` in one line where there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise HiCacheError(f"the demo's own process ended too early, with exit code {code}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise HiCacheError(answer["error"])
        return answer

    def close(self) -> None:
        """Let it write down what is dirty, and wait for its end. Harmless when closed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait()
        self._notes.join()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._process.kill()
        self.close()

    def _pass_on(self, note: Callable[[str], None]) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                note(line.rstrip())
