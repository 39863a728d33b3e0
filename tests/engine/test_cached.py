"""The engine with HiCache under it: what hits, where from, and that no token changes."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicache.actions import HitTokens
from hicache.cache import HiCache
from hicache.cache.opening import open_parts
from hicache.config import CacheConfig
from hicache.engine import metrics_page
from hicache.engine.engine import Engine
from hicache.engine.model import LoadedModel
from hicache.engine.outputs import SamplingParams
from hicache.events import Finished, OpId
from hicache.layout import KVLayout
from hicache.pools import DevicePool, HostPool
from hicache.transfer import CpuTransfer
from hicache.transfer.base import Wake
from tests.engine.kit import (
    GREEDY,
    Unhurried,
    greedy_reference,
    make_engine,
    open_unhurried,
    prompt,
)

PAGE_SIZE = 8


Open = Callable[..., AbstractContextManager[Engine]]


@pytest.fixture
def open_engine(llama: LoadedModel) -> Open:
    """Makes engines with HiCache, all of whose storage is waited for."""

    def make(**overrides: object) -> Engine:
        overrides = {"cache__storage__prefetch": "wait_complete", **overrides}
        return make_engine(llama, open_unhurried, **overrides)

    return make


@pytest.fixture
def engine(open_engine: Open) -> Iterator[Engine]:
    with open_engine() as engine:
        yield engine
    cache_of(engine).check()


def cache_of(engine: Engine) -> HiCache:
    assert isinstance(engine.cache, HiCache)
    return engine.cache


def ask(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams = GREEDY,
    salt: str | None = None,
) -> tuple[list[int], HitTokens]:
    """Return what is generated, and what was hit."""
    generation = engine.submit(prompt_ids, params, salt=salt)
    outputs = list(generation)
    assert outputs[-1].error is None
    return [token_id for output in outputs for token_id in output.token_ids], generation.hit


def all_is_given_back(engine: Engine) -> bool:
    """Whether no request holds anything; to be asked of a closed engine."""
    cache_of(engine).check()
    return cache_of(engine).stats().num_operations == 0 and engine.num_running == 0


def test_a_prompt_is_computed_once(engine: Engine, llama: LoadedModel) -> None:
    ids = prompt(50)
    expected = greedy_reference(llama, ids, 16)

    first, second = ask(engine, ids), ask(engine, ids)

    assert first == (expected, HitTokens())
    # 48 tokens in whole pages; the last token is always computed.
    assert second == (expected, HitTokens(device=49))


def test_each_turn_hits_all_that_the_turn_before_computed(
    engine: Engine, llama: LoadedModel
) -> None:
    ids = prompt(21)
    computed = 0
    for turn in range(4):
        text, hit = ask(engine, ids)
        assert text == greedy_reference(llama, ids, 16)
        assert (computed // PAGE_SIZE) * PAGE_SIZE <= hit.total <= len(ids) - 1
        computed = len(ids) + len(text) - 1
        ids = [*ids, *text, *prompt(9, seed=turn + 50)]


def test_a_prompt_that_leaves_another_in_mid_page_hits_to_the_token(
    engine: Engine, llama: LoadedModel
) -> None:
    ids = prompt(40)
    ask(engine, ids)
    branch = [*ids[:29], *prompt(11, seed=9)]

    text, hit = ask(engine, branch)

    assert hit == HitTokens(device=29)
    assert text == greedy_reference(llama, branch, 16)


def test_what_l1_lost_comes_back_from_l2(open_engine: Open, llama: LoadedModel) -> None:
    with open_engine(cache__device__size="20p", cache__host__size="200p") as engine:
        ids = prompt(60)
        ask(engine, ids)
        for seed in range(1, 4):
            ask(engine, prompt(100, seed))

        text, hit = ask(engine, ids)

    assert hit == HitTokens(host=59)
    assert text == greedy_reference(llama, ids, 16)
    assert all_is_given_back(engine)


def test_what_was_flushed_comes_back_from_l3(
    open_engine: Open, llama: LoadedModel, tmp_path: Path
) -> None:
    """As SGLang's cache_hit_kit asks: at most one page is not cached."""
    ids = prompt(16 * PAGE_SIZE)
    four = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    store = {"cache__storage__backend": "lmdb", "cache__storage__path": str(tmp_path)}
    with open_engine(**store) as engine:
        first, _ = ask(engine, ids, four)
        assert engine.flush(30)

        second, hit = ask(engine, ids, four)

    assert first == second == greedy_reference(llama, ids, 4)
    assert hit.storage == hit.total >= len(ids) - PAGE_SIZE


def test_a_new_process_hits_what_the_old_one_stored(
    open_engine: Open, llama: LoadedModel, tmp_path: Path
) -> None:
    ids = prompt(100)
    store = {"cache__storage__backend": "lmdb", "cache__storage__path": str(tmp_path)}
    with open_engine(**store) as engine:
        ask(engine, ids)

    with open_engine(**store) as engine:
        text, hit = ask(engine, ids)

    assert hit.storage >= 96
    assert text == greedy_reference(llama, ids, 16)


def test_tenants_do_not_share(engine: Engine, llama: LoadedModel) -> None:
    ids = prompt(50)
    expected = greedy_reference(llama, ids, 16)

    answers = [ask(engine, ids, salt=salt) for salt in ("a", None, "b", "a")]

    assert [text for text, _ in answers] == [expected] * 4
    assert [hit.total for _, hit in answers] == [0, 0, 0, 49]


def test_twins_that_arrive_together_are_computed_once(engine: Engine, llama: LoadedModel) -> None:
    ids = prompt(100)

    generations = [engine.submit(ids, GREEDY) for _ in range(4)]
    texts = [[token for output in each for token in output.token_ids] for each in generations]

    assert texts == [greedy_reference(llama, ids, 16)] * 4
    assert sorted(each.hit.total for each in generations) == [0, 96, 96, 96]


@pytest.mark.parametrize("num_pages", [12, 16, 24])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_preemption_changes_no_text(
    open_engine: Open, llama: LoadedModel, num_pages: int, write_policy: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [prompt(20 + seed, seed) for seed in range(5)]
    with open_engine(
        cache__device__size=f"{num_pages}p", cache__host__write_policy=write_policy
    ) as engine:
        generations = [engine.submit(ids, params) for ids in prompts]
        texts = [[token for output in each for token in output.token_ids] for each in generations]

    assert engine.counters.num_preemptions > 0
    assert texts == [greedy_reference(llama, ids, 40) for ids in prompts]
    assert all_is_given_back(engine)


def test_a_preempted_request_reports_its_first_hit(open_engine: Open) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with open_engine(cache__device__size="12p") as engine:
        generations = [engine.submit(prompt(20, seed), params) for seed in range(4)]
        for generation in generations:
            list(generation)

    assert engine.counters.num_preemptions > 0
    assert [generation.hit.total for generation in generations] == [0] * 4
    assert engine.counters.num_prompt_tokens == 80


def test_aborts_at_any_moment_give_everything_back(
    open_engine: Open, llama: LoadedModel, tmp_path: Path
) -> None:
    store = {"cache__storage__backend": "lmdb", "cache__storage__path": str(tmp_path)}
    ids = prompt(60)
    with open_engine(cache__device__size="24p", **store) as engine:
        for seed in range(30):
            generation = engine.submit(prompt(10 + 3 * seed, seed % 7), GREEDY)
            outputs = iter(generation)
            for _ in range(seed % 4):
                next(outputs)
            generation.abort()
            list(outputs)
        text, _ = ask(engine, ids)

    assert text == greedy_reference(llama, ids, 16)
    assert all_is_given_back(engine)


def test_reasoning_that_history_drops_is_not_kept(llama: LoadedModel, open_engine: Open) -> None:
    ids = prompt(30)
    text = greedy_reference(llama, ids, 30)
    thought = text[10]
    template = llama.template
    template.drops_reasoning, template.reasoning_ids = True, (thought,)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    at = 30 + text.index(thought)
    try:
        with open_engine() as engine:
            ask(engine, ids, params)
            _, dropped = ask(engine, [*ids, *text, 5])
        with open_engine(engine__commit_reasoning=True) as engine:
            ask(engine, ids, params)
            _, kept = ask(engine, [*ids, *text, 5])
    finally:
        template.drops_reasoning, template.reasoning_ids = False, ()

    assert dropped.total == at // PAGE_SIZE * PAGE_SIZE
    assert kept.total >= 56


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_crowd_gets_the_same_texts_as_everybody_alone(
    open_engine: Open, llama: LoadedModel, policy: str, is_fixed: bool
) -> None:
    shared = prompt(37)
    prompts = [[*shared[: 37 - 5 * (seed % 3)], *prompt(5 + seed, seed + 10)] for seed in range(12)]
    with open_engine(
        engine__schedule=policy,
        engine__fixed_chunks=is_fixed,
        cache__device__size="40p",
        cache__host__size="60p",
    ) as engine:
        for _ in range(2):
            generations = [engine.submit(ids, GREEDY) for ids in prompts]
            texts = [[t for output in each for t in output.token_ids] for each in generations]
            assert texts == [greedy_reference(llama, ids, 16) for ids in prompts]

    assert sum(engine.counters.hit_tokens.values()) > 0
    assert all_is_given_back(engine)


class BadLoads(CpuTransfer):
    """Loads the wrong pages, and says that it failed, as often as it was told."""

    num_bad = 0

    def __init__(self, device: DevicePool, host: HostPool, wake: Wake | None = None) -> None:
        super().__init__(device, host, wake)
        self._bad: set[OpId] = set()

    def load(self, op: OpId, source: "array[int]", target: "array[int]") -> None:
        """Copy pages in the wrong order."""
        if self.num_bad:
            self.num_bad -= 1
            self._bad.add(op)
            source = source[::-1]
        super().load(op, source, target)

    def drain(self) -> list[Finished]:
        """Say which loads failed."""
        return [
            Finished(done.op, [False] * len(done.outcomes)) if done.op in self._bad else done
            for done in super().drain()
        ]


@pytest.mark.parametrize("num_bad", [1, 3])
@pytest.mark.parametrize("num_twins", [1, 3])
def test_a_failed_load_is_computed_instead(
    llama: LoadedModel, num_bad: int, num_twins: int
) -> None:
    transfers: list[BadLoads] = []

    def open_bad(layout: KVLayout, config: CacheConfig, device: str) -> HiCache:
        parts = open_parts(layout, config, device, time.monotonic)
        parts.transfer.close()
        parts.transfer = transfer = BadLoads(parts.device, parts.host, parts.wake)
        transfers.append(transfer)
        return Unhurried(layout, config, device=device, parts=parts)

    ids = prompt(60)
    engine = make_engine(llama, open_bad, cache__device__size="40p", cache__host__size="400p")
    with engine:
        ask(engine, ids)
        for seed in range(1, 6):
            ask(engine, prompt(100, seed))
        transfers[0].num_bad = num_bad
        twins = [engine.submit(ids, GREEDY) for _ in range(num_twins)]
        texts = [[t for output in each for t in output.token_ids] for each in twins]
        again, _ = ask(engine, ids)

    expected = greedy_reference(llama, ids, 16)
    assert texts == [expected] * num_twins
    assert again == expected
    assert engine.counters.num_revoked > 0
    assert all_is_given_back(engine)


def test_what_was_counted_adds_up(engine: Engine) -> None:
    ids = prompt(50)
    ask(engine, ids)
    ask(engine, ids)

    counters = engine.counters
    assert counters.num_prompt_tokens == 100
    assert counters.num_computed_tokens + sum(counters.hit_tokens.values()) == 100
    assert 0 < engine.cache_seconds < engine.step_seconds


def test_metrics_tell_tiers_and_storage(open_engine: Open, tmp_path: Path) -> None:
    store = {"cache__storage__backend": "lmdb", "cache__storage__path": str(tmp_path)}
    with open_engine(**store) as engine:
        ask(engine, prompt(50))
        assert engine.flush(30)
        ask(engine, prompt(50))
        text = metrics_page.render(engine).decode()

    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(name.startswith("hicache_") for name in families)
    stored = families["hicache_stored_pages"].samples
    assert [sample.labels["tier"] for sample in stored] == ["storage"]
    moved = families["hicache_moved_bytes"].samples
    directions = {sample.labels["direction"]: sample.value for sample in moved}
    assert all(directions[name] > 0 for name in ("load", "back_up", "fetch", "store"))
    assert families["hicache_storage_up"].samples[0].value == 1
    assert families["hicache_storage_foreign_pages"].samples[0].value == 0
    missed = families["hicache_storage_missed_pages"].samples
    assert {sample.labels["kind"] for sample in missed} == {"probe"}
    assert families["hicache_storage_dropped_pages"].samples == []
    evicted = families["hicache_evicted_pages"].samples
    assert "flush" in {sample.labels["reason"] for sample in evicted}
