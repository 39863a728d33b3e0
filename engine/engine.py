"""The engine: one thread that owns the model and the cache, and a door for everybody else.

From outside come arrivals, aborts and flushes, at any time and from any thread; the step thread
takes them in between two steps. It sleeps when there is nothing to do. An exception in a step
ends the requests of that step with an error, and the engine goes on.
"""

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from types import TracebackType
from typing import Self

import torch

from hicache.config import Config
from hicache.engine.caching import OpenCache
from hicache.engine.counters import Counters
from hicache.engine.detokenizing import Detokenizer
from hicache.engine.generation import Generation
from hicache.engine.largest_batch import run_largest_batch
from hicache.engine.loading import load_model
from hicache.engine.model import LoadedModel
from hicache.engine.namespaces import Namespaces
from hicache.engine.opening import open_hicache
from hicache.engine.outputs import SamplingParams
from hicache.engine.prompts import checked
from hicache.engine.recovery import is_device_error, is_device_well, one_line, release_memory
from hicache.engine.requests import Request
from hicache.engine.runner import ModelRunner
from hicache.engine.sampling import Sampler
from hicache.engine.scheduler import Scheduler
from hicache.engine.stepping import Stepper
from hicache.engine.stopping import Answer
from hicache.errors import HiCacheError
from hicache.events import RequestId

POLL_S = 0.02
"""How often an engine without requests looks what its cache has finished, at first."""

LAZY_POLL_S = 0.25
"""And after ``LAZY_AFTER_S`` without requests."""

LAZY_AFTER_S = 10.0

logger = logging.getLogger("hicache.engine")


class QueueFull(HiCacheError):
    """As many requests wait as may: try again later."""


class EngineClosed(HiCacheError):
    """The engine is closing or closed: it takes nothing new."""


@dataclass(slots=True)
class _Flush:
    deadline: float | None
    done: "Future[bool]" = field(default_factory=Future)


class Engine:
    """Runs requests on one model. Thread-safe."""

    def __init__(
        self,
        config: Config,
        model: LoadedModel | None = None,
        *,
        open_cache: OpenCache = open_hicache,
        is_device_well: Callable[[torch.device], bool] = is_device_well,
    ) -> None:
        """Load the model, unless one is given, open the cache and start.

        Raises ``ConfigError`` in one line for what cannot work.
        """
        self.config = config
        self.failure: str | None = None  # why it cannot go on, if the device failed
        self._is_device_well = is_device_well
        self.model = load_model(config.engine) if model is None else model
        self.model_name = config.server.model_name or self.model.name
        self.tokenizer = self.model.tokenizer
        self.context_tokens = self.model.context_tokens
        self.page_size = config.cache.page_size
        self.layout = self.model.layout_for(self.page_size)
        if self.model.device.type == "cuda" and config.cache.device.size == "auto":
            run_largest_batch(self.model, config.engine, self.page_size)
        self.cache = open_cache(self.layout, config.cache, str(self.model.device))
        self.num_device_pages = len(self.cache.device_pages)
        if self.model.prefill_tokens_per_s:  # until it is measured on real prompts
            self.cache.measured(round(self.model.prefill_tokens_per_s), 1.0)
        self._namespaces = Namespaces(self.cache, self.model, self.layout)
        self._stepper = self._make_stepper()
        self._namespaces.digest(None)
        self._sequence = count()
        self._changed = threading.Condition()
        self._arrivals: deque[Request] = deque()
        """Bounded by ``max_waiting``; held back while a flush waits for the running to end."""
        self._aborts: deque[Request] = deque()
        self._flushes: deque[_Flush] = deque()
        self._is_closing = False
        self._close_timeout_s = 0.0
        self._is_closed_in_order = False
        self._idle = threading.Event()
        self._idle_since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hicache-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ from any thread

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        salt: str | None = None,
        priority: int = 0,
        request_name: str | None = None,
    ) -> Generation:
        """Queue a request and return where its outputs come out.

        Raises ``InputError`` for a prompt or parameters that cannot run, ``QueueFull``, and
        ``EngineClosed``; nothing is then left behind.
        """
        device_tokens = self.num_device_pages * self.page_size
        tokens = checked(prompt_ids, self.model.vocab_size, self.context_tokens, device_tokens)
        request = self._request(tokens, params, request_name)
        request.salt, request.priority = salt, priority
        with self._changed:
            if self._is_closing:
                raise EngineClosed(self.failure or "the engine is shutting down")
            if self.num_waiting >= self.config.engine.max_waiting:
                raise QueueFull(f"{self.num_waiting} requests are waiting: try again later")
            self._arrivals.append(request)
            self._idle.clear()
            self._rouse()
        return request.generation

    def flush(self, timeout_s: float | None) -> bool:
        """Write down what is dirty, then empty L1 and L2; False where requests kept running.

        Waits up to ``timeout_s`` for running requests and for writing; ``None``: not at all for
        requests. New requests wait meanwhile.
        """
        flush = _Flush(None if timeout_s is None else time.monotonic() + timeout_s)
        with self._changed:
            if self._is_closing:
                return False
            self._flushes.append(flush)
            self._rouse()
        return flush.done.result()

    def drain(self, timeout_s: float) -> bool:
        """Wait until there is no request; False where there still is one after the timeout."""
        return self._idle.wait(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Abort what runs, write down what is dirty, and end. Harmless when closed.

        False where a thread hangs in storage: the interpreter may then wait for it at its end.
        """
        with self._changed:
            self._close_timeout_s = timeout_s
            self._is_closing = True
            self._rouse()
        self._thread.join()
        return self._is_closed_in_order

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive() and not self._is_closing

    @property
    def counters(self) -> Counters:
        """Totals so far; written by the step thread."""
        return self._stepper.counters

    @property
    def cache_seconds(self) -> float:
        """CPU time that the step thread has spent in calls of the cache."""
        return self._stepper.cache.seconds

    @property
    def step_seconds(self) -> float:
        """Wall clock of the steps in which something was computed."""
        return self.counters.step_seconds

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet."""
        return len(self._arrivals) + len(self._stepper.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold pages of L1."""
        return len(self._stepper.scheduler.running)

    def info(self) -> dict[str, object]:
        """Return what /server_info says."""
        return {
            "model": self.model_name,
            "device": str(self.model.device),
            "dtype": self.layout.dtype,
            "attention": self.model.attention,
            "page_size": self.page_size,
            "context_tokens": self.context_tokens,
            "max_total_num_tokens": self.num_device_pages * self.page_size,
            "num_waiting": self.num_waiting,
            "num_running": self.num_running,
            **self.counters.totals(),
            "cache_seconds": self.cache_seconds,
            "cache": self.cache.describe(),
        }

    # ------------------------------------------------------------ the step thread

    def _run(self) -> None:
        is_going = True
        while is_going:
            try:
                is_going = self._turn()
            except Exception as error:
                logger.exception("a step failed")
                is_going = self._recover(error)
        self._shut()

    def _recover(self, error: Exception) -> bool:
        """Go on after a step that raised; False where the device cannot."""
        if not is_device_error(error):
            self._stepper.fail(error)
            release_memory()
        elif self._is_device_well(self.model.device):
            self._stepper.try_again(error)
        else:
            self._give_up(error)
            return False
        if self._stepper.is_idle:
            time.sleep(POLL_S)  # what fails without a request will fail again
        return True

    def _give_up(self, error: Exception) -> None:
        """Refuse all there is and will be: a GPU that failed needs another process."""
        self.failure = f"the device failed, this server must be restarted: {one_line(error)}"
        logger.critical("%s", self.failure)
        with self._changed:
            self._is_closing = True
            self._close_timeout_s = self.config.server.shutdown_s
        self._stepper.end_all("error", self.failure)
        while self._arrivals:
            self._stepper.end_unbegun(self._arrivals.popleft(), self.failure)

    def _turn(self) -> bool:
        """Take in what came, and step once or sleep; False when it is time to end."""
        self._take_in()
        if self._is_closing:
            return False
        if self._stepper.step():
            return True
        if not self._stepper.is_idle:
            self.cache.wait_for_progress(0.005)
            return True
        self._sleep()
        return True

    def _take_in(self) -> None:
        while self._aborts:
            self._drop(self._aborts.popleft())
        if self._flushes:
            self._try_flush()
        self._begin_arrivals()

    def _begin_arrivals(self) -> None:
        """Also called while a forward computes, so that fetching ahead begins at once."""
        while self._arrivals and not self._flushes and not self._is_closing:
            self._stepper.add(self._arrivals.popleft())

    def _drop(self, request: Request) -> None:
        with self._changed:
            has_not_begun = request in self._arrivals
            if has_not_begun:
                self._arrivals.remove(request)
        if has_not_begun:
            self._stepper.end_unbegun(request)
        self._stepper.abort(request)

    def _try_flush(self) -> None:
        """Carry out the oldest flush if it can be, or give it up if it may not wait."""
        flush = self._flushes[0]
        left_s = None if flush.deadline is None else max(0.0, flush.deadline - time.monotonic())
        if not self._stepper.is_idle:
            if not left_s:
                self._flushes.popleft().done.set_result(False)
            return
        self._flushes.popleft()
        try:
            self.cache.flush(left_s)
        except BaseException as error:
            flush.done.set_exception(error)
            raise
        flush.done.set_result(True)

    def _sleep(self) -> None:
        """Wait for somebody to come, but look after the cache's own work now and then."""
        now = time.monotonic()
        if not self._idle.is_set():
            self._idle_since = now
        is_lazy = now - self._idle_since > LAZY_AFTER_S
        with self._changed:
            if self._arrivals or self._aborts or self._flushes or self._is_closing:
                return
            self._idle.set()
            self._changed.wait(LAZY_POLL_S if is_lazy else POLL_S)

    def _shut(self) -> None:
        self._stepper.end_all()
        while self._arrivals:
            self._stepper.end_unbegun(self._arrivals.popleft())
        while self._flushes:
            self._flushes.popleft().done.set_result(False)
        self._idle.set()
        try:
            self._is_closed_in_order = self.cache.close(self._close_timeout_s)
        except HiCacheError:
            logger.exception("the cache was not closed in order")

    # ------------------------------------------------------------ helpers

    def _rouse(self) -> None:
        """Have the step thread look, whichever way it sleeps. With ``_changed`` held."""
        self._changed.notify()
        self.cache.wake()

    def _request(self, tokens: "array[int]", params: SamplingParams, name: str | None) -> Request:
        max_tokens = min(params.max_tokens, self.context_tokens - len(tokens))
        params = replace(params, max_tokens=max_tokens)
        sequence = next(self._sequence)
        generation = Generation(
            name or f"request-{sequence}",
            len(tokens),
            time.monotonic(),
            on_abort=lambda: self._abort(request),
        )
        request = Request(
            id=RequestId(0),
            sequence=sequence,
            tokens=bytearray(tokens.tobytes()),
            num_prompt_tokens=len(tokens),
            generation=generation,
            sampler=Sampler(params),
            answer=Answer(Detokenizer(self.tokenizer, tokens), params, self.model.eos_token_ids),
            reasoning_ids=self._reasoning_ids(),
        )
        return request

    def _make_stepper(self) -> Stepper:
        settings = self.config.engine
        scheduler = Scheduler(
            settings.schedule,
            page_size=self.page_size,
            max_batch=settings.max_batch,
            chunk_tokens=settings.chunk_tokens,
            fixed_chunks=settings.fixed_chunks,
        )
        runner = ModelRunner(self.model, self.cache.device_pages)
        if settings.cuda_graphs and self.model.device.type == "cuda":
            runner.use_graphs(settings.max_batch)
        stepper = Stepper(self.cache, runner, scheduler, self._namespaces.digest)
        stepper.meanwhile = self._begin_arrivals
        return stepper

    def _reasoning_ids(self) -> tuple[int, ...]:
        template = self.model.template
        is_kept = self.config.engine.commit_reasoning or not template.drops_reasoning
        return () if is_kept else template.reasoning_ids

    def _abort(self, request: Request) -> None:
        with self._changed:
            if request.generation.is_ended:
                return
            self._aborts.append(request)
            self._rouse()
