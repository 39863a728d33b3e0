"""Servers as processes, with small settings, for tests of what they say and how they end."""

import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]

SMALL = {
    "cache.page_size": "8",
    "cache.device.size": "40p",
    "cache.host.size": "400p",
    "cache.storage.backend": "none",
    "cache.storage.size": "64MB",
    "cache.storage.prefetch": "wait_complete",
    "engine.device": "cpu",
    "server.port": "0",
}


def command(model: Path, **overrides: object) -> list[str]:
    """Return ``hicache serve``; ``cache__page_size=4`` sets ``cache.page_size``."""
    settings = SMALL | {name.replace("__", "."): str(value) for name, value in overrides.items()}
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    return ["serve", "--model", str(model), *flags]


class Server:
    """A process that serves, and what it has said so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        """What it has said on stderr."""
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, name="test-stderr")
        self._reader.start()

    def wait_until_it_listens(self) -> None:
        """Wait for the line that says so."""
        assert self._listens.wait(120), self.lines
        assert self.url, self.lines

    @property
    def url(self) -> str:
        """Where it listens; empty if it does not."""
        said = [line for line in self.lines if line.startswith("listening on ")]
        return said[0].removeprefix("listening on ") if said else ""

    def post(self, path: str, **request: Any) -> httpx.Response:
        """Send a request."""
        return httpx.post(f"{self.url}{path}", timeout=60, **request)

    def ask(self, prompt_ids: Sequence[int], num_tokens: int = 4) -> tuple[list[int], int]:
        """Return what is said greedily, and how much of the prompt was hit."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": prompt_ids, "sampling_params": sampling}
        response = self.post("/generate", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    def ask_until_hit(self, prompt_ids: Sequence[int]) -> tuple[list[int], int]:
        """Ask for what is in storage until it comes from there.

        A tiny model may compute faster than a disk reads. Then it computes, and tries the disk
        again another time.
        """
        for _ in range(20):
            answer = self.ask(prompt_ids)
            if answer[1]:
                return answer
            self.flush()
        raise AssertionError("never hit")

    def flush(self) -> None:
        """Let it write down everything, and empty L1 and L2."""
        assert self.post("/flush_cache?timeout=30").status_code == 200

    def end(self) -> int:
        """Ask it to end; return its exit code once all it says is in ``lines``."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join()
        return code

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("listening on "):
                self._listens.set()
        self._listens.set()
        self.process.stderr.close()


@contextmanager
def server(model: Path, *, limit: str = "", **overrides: object) -> Iterator[Server]:
    """Run ``hicache serve``; ``limit`` is a shell's command that goes before, as ``ulimit``."""
    arguments = [sys.executable, "-m", "hicache.tools.cli", *command(model, **overrides)]
    if limit:
        arguments = ["sh", "-c", f"{limit}; exec {shlex.join(arguments)}"]
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    running = Server(process)
    try:
        running.wait_until_it_listens()
        yield running
    finally:
        running.kill()
