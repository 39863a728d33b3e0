"""What tests of the engine share: engines over a tiny model, a server over an engine."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import torch
import uvicorn

from hicache.cache import HiCache, Polled
from hicache.config import CacheConfig, Config, load
from hicache.engine.caching import OpenCache
from hicache.engine.engine import Engine
from hicache.engine.model import LoadedModel
from hicache.engine.outputs import SamplingParams
from hicache.engine.server import build_app
from hicache.engine.uncached import PrivatePages
from hicache.layout import KVLayout


class GatedPages(PrivatePages):
    """Private pages with a gate in front of every step, which a test opens."""

    def __init__(self, layout: KVLayout, num_pages: int, device: str = "cpu") -> None:
        super().__init__(layout, num_pages, device)
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def let(self, num_steps: int) -> None:
        """Let that many steps begin."""
        self._permits.release(num_steps)

    def open_gate(self) -> None:
        """Let all steps begin from now on."""
        self._is_open = True
        self._permits.release()

    def poll(self) -> Polled:
        """Wait at the gate."""
        if not self._is_open:
            self._permits.acquire()
        return super().poll()


class Unhurried(HiCache):
    """A cache that is never told how fast a tiny model computes, and so always reloads."""

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Ignore it."""


def open_unhurried(layout: KVLayout, config: CacheConfig, device: str) -> HiCache:
    """Return such a cache."""
    return Unhurried(layout, config, device=device)


GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def settings(**overrides: object) -> Config:
    """Return small settings; ``engine__max_batch=2`` sets ``engine.max_batch``."""
    dotted: dict[str, object] = {
        "cache.page_size": 8,
        "cache.device.size": "64p",
        "cache.host.size": "256p",
        "cache.storage.backend": "none",
        "engine.device": "cpu",
        "engine.chunk_tokens": 32,
        "server.model_name": "tiny",
        "server.shutdown_s": 10.0,
    }
    dotted |= {name.replace("__", "."): value for name, value in overrides.items()}
    return load(None, {}, dotted)


def make_engine(
    model: LoadedModel, open_cache: OpenCache = PrivatePages.open, **overrides: object
) -> Engine:
    """Return a running engine over a tiny model, with small settings."""
    return Engine(settings(**overrides), model, open_cache=open_cache)


def greedy_reference(model: LoadedModel, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return what the model itself says greedily, computed anew for every token, without pages."""
    attention = model.model.config._attn_implementation
    assert attention is not None
    model.model.set_attn_implementation("eager")
    try:
        ids = list(prompt_ids)
        with torch.inference_mode():
            for _ in range(num_tokens):
                logits = model.model(input_ids=torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
    finally:
        model.model.set_attn_implementation(attention)
    return ids[len(prompt_ids) :]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return tokens that look like no other prompt's."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(3, 300, (length,), generator=generator).tolist()


def tokens_of(
    engine: Engine, prompt_ids: Sequence[int], params: SamplingParams = GREEDY
) -> list[int]:
    """Return what an engine generates."""
    outputs = list(engine.submit(prompt_ids, params))
    assert outputs[-1].error is None
    return [token_id for output in outputs for token_id in output.token_ids]


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve an engine on a free port of the loopback; yield the URL."""
    config = uvicorn.Config(build_app(engine), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
