"""The engine from outside: threads, queues, flushes, ends."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from hicache.actions import Refuse, Wait
from hicache.cache import Lease, Polled
from hicache.engine.engine import Engine, EngineClosed, QueueFull
from hicache.engine.llm import LLM
from hicache.engine.model import LoadedModel
from hicache.engine.outputs import SamplingParams
from hicache.engine.uncached import PrivatePages
from hicache.errors import ConfigError, InputError
from hicache.events import RequestId
from hicache.layout import KVLayout
from tests.engine.kit import GREEDY, greedy_reference, make_engine, prompt, settings, tokens_of

ENDLESS = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)


@pytest.fixture
def engine(llama: LoadedModel) -> Iterator[Engine]:
    with make_engine(llama) as engine:
        yield engine


def pages_of(engine: Engine) -> PrivatePages:
    assert isinstance(engine.cache, PrivatePages)
    return engine.cache


def everything_is_free(engine: Engine) -> bool:
    assert engine.drain(60)
    pages = pages_of(engine)
    pages.check()
    return pages.num_free_pages == len(pages.device_pages)


def test_many_threads_get_their_own_texts(engine: Engine, llama: LoadedModel) -> None:
    found: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        found[seed] = tokens_of(engine, prompt(10 + seed, seed))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for seed in range(8):
        assert found[seed] == greedy_reference(llama, prompt(10 + seed, seed), 16)
    assert everything_is_free(engine)


class SleepyPages(PrivatePages):
    """Grants nothing until it is told to, and sleeps until it is woken."""

    def __init__(self, layout: KVLayout, num_pages: int, device: str = "cpu") -> None:
        super().__init__(layout, num_pages, device)
        self.sleeps = threading.Event()
        self.is_granting = False
        self._is_woken = threading.Event()

    def acquire(self, request: RequestId, num_tokens_ahead: int) -> Lease | Wait | Refuse:
        """Have the request wait for storage that does not come."""
        if self.is_granting:
            return super().acquire(request, num_tokens_ahead)
        return Wait(request, "storage")

    def wait_for_progress(self, timeout_s: float) -> None:
        """Sleep however long it takes."""
        self.sleeps.set()
        assert self._is_woken.wait(60), "nobody wakes it"
        self._is_woken.clear()

    def wake(self) -> None:
        """End the sleep."""
        self._is_woken.set()


def test_whoever_comes_or_goes_wakes_an_engine_whose_requests_all_wait(llama: LoadedModel) -> None:
    with make_engine(llama, SleepyPages.open) as engine:
        cache = engine.cache
        assert isinstance(cache, SleepyPages)
        waiting = engine.submit(prompt(20), GREEDY)
        assert cache.sleeps.wait(60)

        waiting.abort()
        assert [output.finish_reason for output in waiting] == ["abort"]

        waiting = engine.submit(prompt(20), GREEDY)
        cache.sleeps.clear()
        cache.wake()
        assert cache.sleeps.wait(60)
        cache.is_granting = True
        assert tokens_of(engine, prompt(10, 1)) == greedy_reference(llama, prompt(10, 1), 16)
        assert len(list(waiting)) > 0


def test_outputs_can_be_read_from_an_event_loop(engine: Engine, llama: LoadedModel) -> None:
    async def read() -> list[int]:
        generation = engine.submit(prompt(10), GREEDY)
        return [token_id async for output in generation for token_id in output.token_ids]

    assert asyncio.run(read()) == greedy_reference(llama, prompt(10), 16)


def test_a_reader_whose_loop_is_gone_harms_nobody(engine: Engine) -> None:
    async def leave() -> None:
        generation = engine.submit(prompt(10), GREEDY)
        async for _ in generation:
            break

    asyncio.run(leave())

    assert everything_is_free(engine)


def test_a_generation_says_when_things_happened(engine: Engine) -> None:
    generation = engine.submit(prompt(10), GREEDY)
    list(generation)

    timing = generation.timing
    assert timing.first_token is not None
    assert timing.finished is not None
    assert timing.arrived <= timing.first_token <= timing.finished
    assert (generation.prompt_tokens, generation.hit.total) == (10, 0)


def test_an_abort_ends_a_generation_and_is_harmless_afterwards(engine: Engine) -> None:
    generation = engine.submit(prompt(10), ENDLESS)
    outputs = iter(generation)
    next(outputs)

    generation.abort()
    rest = list(outputs)
    generation.abort()

    assert rest[-1].finish_reason == "abort"
    assert everything_is_free(engine)


def test_a_waiting_request_can_be_aborted(llama: LoadedModel) -> None:
    with make_engine(llama, engine__max_batch=1) as engine:
        runs = engine.submit(prompt(10), ENDLESS)
        next(iter(runs))
        waits = engine.submit(prompt(10, 1), GREEDY)

        waits.abort()

        assert [output.finish_reason for output in waits] == ["abort"]
        runs.abort()
        assert everything_is_free(engine)


def test_a_full_queue_refuses(llama: LoadedModel) -> None:
    with make_engine(llama, engine__max_batch=1, engine__max_waiting=2) as engine:
        runs = engine.submit(prompt(10), ENDLESS)
        next(iter(runs))
        waiting = [engine.submit(prompt(10, seed), GREEDY) for seed in (1, 2)]

        with pytest.raises(QueueFull):
            engine.submit(prompt(10, 3), GREEDY)

        runs.abort()
        assert [list(generation)[-1].finish_reason for generation in waiting] == ["length"] * 2


@pytest.mark.parametrize(
    ("prompt_ids", "text"),
    [
        ([], "empty"),
        ([-1], "token id"),
        ([320], "token id"),
        ([2**40], "token id"),
        ([3] * 1024, "context"),
        ([3] * 600, "L1 holds 512"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(
    engine: Engine, prompt_ids: list[int], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        engine.submit(prompt_ids, GREEDY)


def test_a_text_ends_where_the_context_does(llama: LoadedModel) -> None:
    with make_engine(llama, cache__device__size="200p") as engine:
        generation = engine.submit([3] * 1014, ENDLESS)

        outputs = list(generation)

    assert outputs[-1].finish_reason == "length"
    assert sum(len(output.token_ids) for output in outputs) == 10


def test_a_flush_needs_everybody_to_be_done(engine: Engine) -> None:
    assert engine.flush(None)
    generation = engine.submit(prompt(10), ENDLESS)
    next(iter(generation))

    assert not engine.flush(None)
    assert not engine.flush(0.01)

    generation.abort()
    assert engine.flush(30)


def test_who_arrives_during_a_flush_runs_after_it(engine: Engine, llama: LoadedModel) -> None:
    runs = engine.submit(prompt(10), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    next(iter(runs))
    flushed: list[bool] = []
    flush = threading.Thread(target=lambda: flushed.append(engine.flush(60)))
    flush.start()

    late = tokens_of(engine, prompt(12))
    flush.join()

    assert flushed == [True]
    assert late == greedy_reference(llama, prompt(12), 16)


def test_closing_aborts_what_runs_and_refuses_what_comes(llama: LoadedModel) -> None:
    engine = make_engine(llama)
    generation = engine.submit(prompt(10), ENDLESS)
    next(iter(generation))

    engine.close()
    engine.close()

    assert list(generation)[-1].finish_reason == "abort"
    assert not engine.is_alive
    with pytest.raises(EngineClosed):
        engine.submit(prompt(10), GREEDY)
    assert not engine.flush(1)


class Fragile(PrivatePages):
    """Pages that raise when they are told to."""

    is_broken = False

    def poll(self) -> Polled:
        """Raise, or not."""
        if self.is_broken:
            raise RuntimeError("the cache is broken\nin two lines")
        return super().poll()


def test_a_cache_that_raises_ends_everybody_and_the_engine_goes_on(
    llama: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(llama, Fragile.open, engine__max_batch=1) as engine:
        pages = engine.cache
        assert isinstance(pages, Fragile)
        generations = [engine.submit(prompt(10), ENDLESS) for _ in range(2)]
        next(iter(generations[0]))

        pages.is_broken = True
        lasts = [list(generation)[-1] for generation in generations]
        pages.is_broken = False

        assert [last.finish_reason for last in lasts] == ["error"] * 2
        assert {last.error for last in lasts} == {
            "the step that computed this request failed: RuntimeError: the cache is broken"
        }
        assert tokens_of(engine, prompt(10)) == greedy_reference(llama, prompt(10), 16)
        assert engine.counters.num_failed_steps > 0
        assert "a step failed" in caplog.text
        assert everything_is_free(engine)


def test_an_engine_without_l1_is_a_mistake(llama: LoadedModel) -> None:
    for size in ("none", "3B"):
        with pytest.raises(ConfigError, match=r"cache\.device\.size"):
            make_engine(llama, cache__device__size=size)


def test_what_the_cache_costs_is_counted(engine: Engine) -> None:
    tokens_of(engine, prompt(40))

    assert engine.drain(60)
    assert 0 < engine.cache_seconds < engine.step_seconds
    assert engine.counters.num_steps == 17
    assert engine.counters.num_computed_tokens == 40


# ---------------------------------------------------------------- LLM


def test_an_llm_completes_prompts_in_their_order(llama: LoadedModel) -> None:
    config = settings(engine__model=str(llama.directory), engine__max_waiting=2)
    prompts = [prompt(4 + 7 * seed, seed) for seed in range(6)]
    each = [
        SamplingParams(temperature=0, max_tokens=12 - 2 * seed, ignore_eos=True)
        for seed in range(6)
    ]

    with LLM(config=config, open_cache=PrivatePages.open) as llm:
        completions = llm.generate(prompts, each)

    for seed, completion in enumerate(completions):
        assert completion.token_ids == greedy_reference(llama, prompts[seed], 12 - 2 * seed)
        assert completion.finish_reason == "length"
        assert completion.prompt_tokens == len(prompts[seed])


def test_an_llm_takes_text_tokens_and_chats(llama: LoadedModel) -> None:
    config = settings(engine__max_batch=2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    both: list[str | list[int]] = ["the quick brown fox", prompt(5)]

    with LLM(llama.directory, config, open_cache=PrivatePages.open) as llm:
        by_text = llm.generate("the quick brown fox", GREEDY)
        by_tokens = llm.generate(llama.encode("the quick brown fox"), GREEDY)
        of_both = llm.generate(both, GREEDY)
        by_chat = llm.chat(chat, GREEDY)
        of_chats = llm.chat([chat, chat], GREEDY)
        nothing = llm.generate([], GREEDY)

    assert by_text[0].token_ids == by_tokens[0].token_ids == of_both[0].token_ids
    assert by_chat[0].token_ids == of_chats[1].token_ids
    assert by_chat[0].prompt_tokens == len(llama.template.render(chat))
    assert nothing == []


def test_an_llm_refuses_parameters_that_do_not_match_the_prompts(llama: LoadedModel) -> None:
    with (
        LLM(llama.directory, settings(), open_cache=PrivatePages.open) as llm,
        pytest.raises(InputError, match="2 sampling parameters for 1 prompts"),
    ):
        llm.generate("a", [GREEDY, GREEDY])
