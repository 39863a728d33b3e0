"""Engines whose logits are looked at: with HiCache and without, to the last bit.

An answer comes with the row of logits that each of its tokens was chosen by, and with the pieces
in which its prompt was computed: equal pieces mean equal shapes, and so equal bits.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hicache.actions import HitTokens, Refuse, Wait
from hicache.cache import Lease, Polled
from hicache.config import CacheConfig, EngineConfig
from hicache.engine.caching import OpenCache
from hicache.engine.engine import Engine
from hicache.engine.generation import Generation
from hicache.engine.loading import load_model
from hicache.engine.model import LoadedModel
from hicache.engine.outputs import SamplingParams
from hicache.engine.smollm2 import installed_gguf
from hicache.engine.uncached import PrivatePages
from hicache.errors import ConfigError
from hicache.events import RequestId
from hicache.keys import TOKEN_NBYTES, NamespaceDigest, pack
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from tests.engine.kit import Unhurried, make_engine, prompt
from tests.engine.paged_runs import Pages
from tests.engine.tiny_models import tiny_model

CHUNK = 64
"""What the engines here cut prompts by."""

DEVICE_TOKENS = 256
"""What L1 holds."""

PREFIX = prompt(128, seed=100)
"""Whole pages of every size here, and whole chunks."""
FIRST = [*PREFIX, 7, *prompt(19, seed=101)]
SECOND = [*PREFIX, 8, *prompt(21, seed=102)]
BRANCH = [*PREFIX[:93], 9, *prompt(15, seed=103)]
"""Leaves the prefix in the middle of a page."""

TOLERANCE = 1e-4
"""Of float32 logits, where the same tokens are computed in other shapes."""


def greedy(num_tokens: int) -> SamplingParams:
    """Return how to ask for exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


NO_HIT = HitTokens()


@dataclass(frozen=True)
class Said:
    """An answer, and how it came about."""

    token_ids: list[int]
    logits: Tensor
    """``[tokens, vocabulary]``: what each token was chosen by."""
    hit: HitTokens = NO_HIT
    pieces: tuple[tuple[int, int], ...] = ()
    """Where the forwards of its prompt began and ended; only of one that ran alone."""


@dataclass(frozen=True)
class _Row:
    start: int
    token_ids: list[int]
    logits: Tensor


class Looking:
    """An engine, and every row of logits that its model has computed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.largest_batch = 0
        """Of all forwards."""
        self._rows: list[_Row] = []

    def ask(self, prompt_ids: Sequence[int], num_tokens: int = 6, salt: str | None = None) -> Said:
        """Return what is said to one prompt, alone."""
        begun = len(self._rows)
        generation = self.engine.submit(prompt_ids, greedy(num_tokens), salt=salt)
        said = self.said(prompt_ids, generation)
        pieces = tuple(
            (row.start, row.start + len(row.token_ids))
            for row in self._rows[begun:]
            if row.start < len(prompt_ids)
        )
        return Said(said.token_ids, said.logits, said.hit, pieces)

    def ask_all(self, prompts: Sequence[Sequence[int]], num_tokens: int = 6) -> list[Said]:
        """Return what is said to prompts that come at once; all of lengths far apart."""
        params = greedy(num_tokens)
        generations = [self.engine.submit(prompt_ids, params) for prompt_ids in prompts]
        return [self.said(*each) for each in zip(prompts, generations, strict=True)]

    def said(self, prompt_ids: Sequence[int], generation: Generation) -> Said:
        """Return what a generation says, to its end."""
        outputs = list(generation)
        assert outputs[-1].error is None
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        everything = [*prompt_ids, *token_ids]
        rows = [
            self._chosen_by(everything[:end]) for end in range(len(prompt_ids), len(everything))
        ]
        return Said(token_ids, torch.stack(rows), generation.hit)

    def note(self, module: object, args: object, given: dict[str, Any], output: Any) -> None:
        """Take note of a forward; a hook of the model."""
        ends = (given["logits_to_keep"] + 1).tolist()
        self.largest_batch = max(self.largest_batch, len(ends))
        for (start, end), logits in zip(pairwise([0, *ends]), output.logits[0], strict=True):
            position = int(given["position_ids"][0, start])
            token_ids = given["input_ids"][0, start:end].tolist()
            self._rows.append(_Row(position, token_ids, logits.float().clone()))

    def _chosen_by(self, tokens: Sequence[int]) -> Tensor:
        """Return the last row that was computed of these tokens."""
        for row in reversed(self._rows):
            if row.start + len(row.token_ids) == len(tokens) and row.token_ids == list(
                tokens[row.start :]
            ):
                return row.logits
        raise AssertionError(f"nothing was computed up to token {len(tokens)}")


@contextmanager
def looking(model: LoadedModel, open_cache: OpenCache, **overrides: object) -> Iterator[Looking]:
    """Run an engine that computes prompts alone, in fixed chunks, unless told otherwise."""
    alone: dict[str, object] = {
        "engine__fixed_chunks": True,
        "engine__chunk_tokens": CHUNK,
        "cache__storage__prefetch": "wait_complete",
    }
    with make_engine(model, open_cache, **{**alone, **overrides}) as engine:
        look = Looking(engine)
        hook = engine.model.model.register_forward_hook(look.note, with_kwargs=True)
        try:
            yield look
        finally:
            hook.remove()


def assert_equal(said: Said, expected: Said) -> None:
    """Assert the same tokens, of the same logits, bit by bit."""
    assert said.token_ids == expected.token_ids
    assert torch.equal(said.logits, expected.logits)


def assert_alike(said: Sequence[Said], expected: Sequence[Said]) -> None:
    """Assert the same tokens, of logits that differ by rounding.

    Where the two best logits are a near-tie, the other may be taken: then what was compared is
    right, and the test is skipped, to show it.
    """
    ties: list[str] = []
    for number, (one, other) in enumerate(zip(said, expected, strict=True)):
        for at, (token, wanted) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            assert (one.logits[at] - other.logits[at]).abs().max() <= TOLERANCE
            if token != wanted:
                best = other.logits[at].topk(2).values
                gap = float(best[0] - best[1])
                assert gap <= 2 * TOLERANCE
                ties.append(f"answer {number}, token {at}: its two best logits are {gap:.1e} apart")
                break
    if ties:
        pytest.skip(f"near-ties: {'; '.join(ties)}")


class Meddling(Unhurried):
    """A cache that a test interferes with, on the step thread; else it is as any other."""

    def __init__(self, layout: KVLayout, config: CacheConfig, device: str) -> None:
        super().__init__(layout, config, device=device)
        self.spoils = False
        """Whether the first page of a hit is overwritten with zeros once it is in L1."""
        self.stops_at: int | None = None
        """After committing so many pages the step thread stops, once."""
        self.is_stopped = threading.Event()
        self.may_go_on = threading.Event()
        self._namespaces_opened: list[NamespaceDigest] = []
        self._awaited: tuple[bytes, threading.Event] | None = None

    def open_namespace(self, namespace: Namespace) -> NamespaceDigest:
        """Open it; the first is the one that is watched."""
        self._namespaces_opened.append(super().open_namespace(namespace))
        return self._namespaces_opened[-1]

    def acquire(self, request: RequestId, num_tokens_ahead: int) -> Lease | Wait | Refuse:
        """Lease pages, the first of them spoilt if told so."""
        answer = super().acquire(request, num_tokens_ahead)
        if self.spoils and isinstance(answer, Lease):
            assert answer.hit.total >= self.page_size
            for layer in range(self.layout.num_layers):
                answer.wait(layer)
            self.device_pages[answer.slots[0]] = 0
        return answer

    def commit(self, lease: Lease, tokens: bytes) -> None:
        """Commit, and stop there if told so."""
        super().commit(lease, tokens)
        if self.stops_at is not None and lease.num_committed_pages >= self.stops_at:
            self.stops_at = None
            self.is_stopped.set()
            assert self.may_go_on.wait(60)

    def poll(self) -> Polled:
        """Poll, and see whether what is awaited has been found."""
        polled = super().poll()
        if self._awaited is not None:
            tokens, is_found = self._awaited
            if self.match(self._namespaces_opened[0], tokens).total == len(tokens) // TOKEN_NBYTES:
                is_found.set()
        return polled

    def wait_until_known(self, token_ids: Sequence[int]) -> None:
        """Wait until whole pages are in the tree: a restart finds them in the background."""
        is_found = threading.Event()
        self._awaited = pack(token_ids), is_found
        assert is_found.wait(60)


def meddling(look: Looking) -> Meddling:
    """Return the cache of an engine."""
    assert isinstance(look.engine.cache, Meddling)
    return look.engine.cache


class Models:
    """Models, each loaded once, and what they say without a cache, each computed once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._loaded: dict[str, LoadedModel] = {}
        self._said: dict[tuple[object, ...], Said] = {}

    def load(self, kind: str) -> LoadedModel:
        """Return a model; skip the test where it is not installed."""
        if kind not in self._loaded:
            self._loaded[kind] = self._load(kind)
        return self._loaded[kind]

    def say(
        self, kind: str, prompt_ids: Sequence[int], page_size: int = 16, num_tokens: int = 6
    ) -> Said:
        """Return what an engine without a cache says."""
        key = kind, page_size, num_tokens, tuple(prompt_ids)
        if key not in self._said:
            with looking(
                self.load(kind),
                PrivatePages.open,
                cache__page_size=page_size,
                cache__device__size="512",
            ) as plain:
                self._said[key] = plain.ask(prompt_ids, num_tokens)
        return self._said[key]

    def _load(self, kind: str) -> LoadedModel:
        if kind != "smollm2":
            return tiny_model(self._folders.mktemp(kind), kind)
        try:
            installed_gguf()
        except ConfigError as error:
            pytest.skip(str(error))
        return load_model(EngineConfig(model=kind, device="cpu"))


@contextmanager
def found_in(
    tier: str, model: LoadedModel, folder: Path, *, num_uses: int = 1, **overrides: object
) -> Iterator[Looking]:
    """Run an engine in which what ``FIRST`` has left behind is in that tier.

    ``num_uses``: how often it is asked.
    """
    settings: dict[str, object] = {
        "cache__page_size": 16,
        "cache__device__size": str(DEVICE_TOKENS),
        "cache__host__size": "4096",
        "cache__storage__backend": "lmdb",
        "cache__storage__path": str(folder / "store"),
        **overrides,
    }
    if tier == "restart":
        with looking(model, Meddling, **settings) as look:
            for _ in range(num_uses):
                look.ask(FIRST)
    with looking(model, Meddling, **settings) as look:
        put_into(tier, look, num_uses)
        yield look
        check(look)


def put_into(tier: str, look: Looking, num_uses: int) -> None:
    """Have ``FIRST`` computed, and moved to where it is wanted."""
    if tier == "restart":
        meddling(look).wait_until_known(PREFIX)
        return
    for _ in range(num_uses):
        look.ask(FIRST)
    if tier == "host":
        for seed in (1, 2):
            look.ask(prompt(DEVICE_TOKENS - 66, seed), num_tokens=1)
    if tier == "storage":
        assert look.engine.flush(60)


def check(look: Looking) -> None:
    """Assert that nothing is held by anybody."""
    assert look.engine.flush(60)
    assert meddling(look).stats().num_operations == 0
    meddling(look).check()


def replayed(model: LoadedModel, page_size: int, *prompts: tuple[list[int], int]) -> Said:
    """Compute prompts one after the other on the same pages, without an engine or a cache.

    Each from the token given on, and cut as engines here cut; return what is said to the last.
    """
    pages = Pages(model, num_pages=-(-512 // page_size), page_size=page_size)
    slots = pages.allocate(256)
    answers: list[tuple[list[int], Tensor]] = []
    for tokens, start in prompts:
        inner = [cut for cut in range(0, len(tokens), CHUNK) if cut > start]
        cuts = [start, *inner, len(tokens)]
        answers.append(pages.continue_greedily(tokens, cuts, 6, slots))
    token_ids, logits = answers[-1]
    return Said(token_ids, logits)
