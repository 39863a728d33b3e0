"""A server as a process: what it says, and how it ends."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hicache.engine.model import LoadedModel
from hicache.engine.serving import serve
from hicache.errors import ConfigError
from tests.engine.kit import settings

ROOT = Path(__file__).parents[2]


@contextmanager
def process(model: Path, *others: str) -> Iterator["subprocess.Popen[str]"]:
    """Run ``hicache serve`` on a free port, with small settings."""
    command = [sys.executable, "-m", "hicache.tools.cli", "serve", "--port", "0"]
    command += ["--model", str(model)]
    small = ("cache.page_size=8", "cache.device.size=200p", "cache.storage.backend=none")
    for setting in (*small, "cache.host.size=200p", "engine.device=cpu", *others):
        command += ["--set", setting]
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def until_it_listens(running: "subprocess.Popen[str]") -> tuple[str, list[str]]:
    """Return its URL, and the lines that it said before."""
    assert running.stderr is not None
    lines: list[str] = []
    for line in running.stderr:
        if line.startswith("listening on "):
            return line.removeprefix("listening on ").strip(), lines
        lines.append(line)
    raise AssertionError("".join(lines))


@pytest.mark.slow
def test_a_signal_lets_what_runs_finish_and_ends_well(llama: LoadedModel) -> None:
    body = {"prompt": [3], "max_tokens": 300, "ignore_eos": True, "stream": True}
    with process(llama.directory) as running:
        url, lines = until_it_listens(running)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            chunks = response.iter_lines()
            next(chunks)
            running.send_signal(signal.SIGTERM)
            rest = list(chunks)
        _, messages = running.communicate(timeout=60)

    assert "data: [DONE]" in rest
    assert running.returncode == 0, messages
    assert lines[0] == f"loading {llama.directory} ...\n"
    assert any("tiny-llama" in line for line in lines[1:])
    assert any(line.startswith("L1 device ") for line in lines)
    assert "Traceback" not in messages


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_aborted(llama: LoadedModel) -> None:
    body = {"prompt": [3], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with process(llama.directory, "server.shutdown_s=0") as running:
        url, _ = until_it_listens(running)
        with (
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response,
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as other,
        ):
            next(response.iter_lines())
            next(other.iter_lines())
            running.send_signal(signal.SIGINT)
            _, messages = running.communicate(timeout=60)

    assert running.returncode == 0, messages
    assert "Traceback" not in messages


HANGING_BACKEND = """
import asyncio, sys, threading

from hicache.backends.memory import MemoryBackend


class HangingBackend(MemoryBackend):
    async def put(self, items):
        print("the disk hangs", file=sys.stderr, flush=True)
        await asyncio.to_thread(threading.Event().wait)
"""


@pytest.mark.slow
def test_a_disk_that_hangs_does_not_keep_the_process(
    llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging.py").write_text(HANGING_BACKEND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    storage = ("cache.storage.backend=hanging:HangingBackend", "server.shutdown_s=2")
    with process(llama.directory, *storage) as running:
        url, _ = until_it_listens(running)
        body = {"prompt": list(range(3, 60)), "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert running.stderr is not None
        assert running.stderr.readline() == "the disk hangs\n"

        running.send_signal(signal.SIGTERM)
        _, messages = running.communicate(timeout=60)

    assert answer.status_code == 200
    assert running.returncode == 1
    assert messages.rstrip().endswith("a call of storage hangs: ending without it")
    assert "Traceback" not in messages


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError) as raised:
            serve(settings(server__port=port))

    assert str(raised.value) == f"server.port: 127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}"


def test_a_host_that_is_none_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^server\.host: no\.such\.host\.invalid: "):
        serve(settings(server__host="no.such.host.invalid"))


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)

    with pytest.raises(ConfigError, match=r"^engine\.model: "):
        serve(settings(engine__model=str(tmp_path / "nothing"), server__port=0))

    assert signal.getsignal(signal.SIGTERM) is handler
