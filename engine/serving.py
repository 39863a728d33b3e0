"""A server process, from its settings to its exit code.

It says in a few lines what it will use, serves until SIGTERM or SIGINT, then takes nothing new,
lets what runs finish for half of ``server.shutdown_s``, and writes down what is dirty in the
rest. Then the process ends, also where a disk hangs.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import uvicorn

from hicache.cache.checking import check_storage
from hicache.config import Config
from hicache.engine.engine import Engine
from hicache.engine.server import build_app
from hicache.errors import ConfigError

logger = logging.getLogger("hicache.engine.serving")


def serve(config: Config) -> int:
    """Serve until told to end; return the exit code. Main thread only.

    Raises ``ConfigError`` for what cannot work, before anything is served.
    """
    _log_to_stderr()
    shutdown_s = config.server.shutdown_s
    check_storage(config.cache)
    with _bind(config.server.host, config.server.port) as listener:
        _say(f"loading {config.engine.model} ...")
        engine = Engine(config)
        # A full collection would look at all that the model is made of, 70 to 140 ms each time,
        # though none of it ever becomes garbage.
        gc.collect()
        gc.freeze()
        with _ignoring_signals():
            ending_since = time.monotonic()
            has_ended = False
            try:
                _say(*describe(engine))
                ending_since = _serve(engine, listener, shutdown_s)
            finally:
                _say("writing down what is dirty")
                left_s = shutdown_s - (time.monotonic() - ending_since)
                has_ended = engine.close(max(1.0, left_s))
    if not has_ended:
        _end_at_once("a call of storage hangs: ending without it")
    return 0


def describe(engine: Engine) -> list[str]:
    """Return in a few lines what an engine uses."""
    model, settings = engine.model, engine.config.engine
    return [
        f"model       {engine.model_name}, {engine.layout.dtype} on {model.device}, "
        f"context of {engine.context_tokens:,} tokens",
        f"engine      at most {settings.max_batch} requests and {settings.chunk_tokens} tokens a "
        f"step, {settings.schedule}, pages of {engine.page_size} tokens",
        *engine.cache.describe(),
    ]


class _Server(uvicorn.Server):
    """uvicorn's server, which also says where it listens and when it was told to end."""

    ended_at = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            _say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.ended_at = time.monotonic()
        _say("shutting down: taking nothing new")
        await super().shutdown(sockets=sockets)


def _serve(engine: Engine, listener: socket.socket, shutdown_s: float) -> float:
    """Serve until a signal; return when it came, in seconds of ``time.monotonic``."""
    settings = uvicorn.Config(
        build_app(engine),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, int(shutdown_s / 2)),
    )
    server = _Server(settings)
    server.run(sockets=[listener])
    return server.ended_at or time.monotonic()


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that does not listen yet; raise ``ConfigError`` where none can be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        raise ConfigError(f"server.host: {host}: {error.strerror or error}") from None
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"server.port: {host}:{port}: {error.strerror}") from None
    return listener


@contextlib.contextmanager
def _ignoring_signals() -> Iterator[None]:
    """Leave SIGTERM and SIGINT to uvicorn, which hands them on once it has ended."""

    def note(number: int, frame: FrameType | None) -> None:
        logger.debug("signal %d", number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_at_once(why: str) -> NoReturn:
    """End the process with exit code 1: the interpreter would wait for the thread that hangs."""
    _say(why)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)


def _log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)
