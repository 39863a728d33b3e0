"""The server as OpenAI's clients see it: a real socket, httpx, and OpenAI's own client."""

import json
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicache.cache import Lease
from hicache.engine.engine import Engine
from hicache.engine.model import LoadedModel
from hicache.engine.uncached import PrivatePages
from tests.engine.kit import GREEDY, GatedPages, make_engine, prompt, serving

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def engine(llama: LoadedModel) -> Iterator[Engine]:
    with make_engine(llama) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask_chat(client: openai.OpenAI, **body: object) -> Any:
    """Ask as OpenAI's own client does, without its types: we send and read extensions."""
    create: Any = client.chat.completions.create
    return create(**body)


def ask(client: openai.OpenAI, **body: object) -> Any:
    """Complete a prompt, likewise."""
    create: Any = client.completions.create
    return create(**body)


def events(text: str) -> list[dict[str, object]]:
    """Return the JSON of a stream, which must end with [DONE]."""
    *chunks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def test_a_chat_is_answered(client: openai.OpenAI, llama: LoadedModel) -> None:
    answer = ask_chat(
        client,
        model="tiny",
        messages=CHAT,
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
    )

    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(llama.template.render(CHAT))
    assert answer.usage.completion_tokens == 8
    details = answer.usage.prompt_tokens_details
    assert details.cached_tokens == 0
    assert details.model_extra["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 0}


def test_a_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 8, "temperature": 0, "seed": 3}
    whole = ask_chat(client, **body)

    chunks = list(ask_chat(client, **body, stream=True, stream_options={"include_usage": True}))

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    text = "".join(delta.content or "" for delta in deltas)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_has_no_usage_unless_asked(http: httpx.Client) -> None:
    body = {"messages": CHAT, "max_tokens": 3, "stream": True}

    response = http.post("/v1/chat/completions", json=body)

    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_the_limit_of_tokens_has_two_names(client: openai.OpenAI) -> None:
    answer = ask_chat(
        client,
        model="tiny",
        messages=CHAT,
        max_tokens=3,
        max_completion_tokens=5,
        extra_body={"ignore_eos": True},
    )

    assert answer.usage.completion_tokens == 5


def test_a_seed_repeats_a_text_and_others_differ(client: openai.OpenAI) -> None:
    def say(seed: int) -> str:
        answer = ask(
            client,
            model="tiny",
            prompt="Once",
            max_tokens=12,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return str(answer.choices[0].text)

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(4)}) > 1


def test_prompts_of_every_form_are_completed(client: openai.OpenAI, llama: LoadedModel) -> None:
    ids = llama.encode("the quick")
    forms: list[object] = ["the quick", ids, ["the quick", "brown"], [ids, [5, 6]]]

    texts = [
        [
            choice.text
            for choice in ask(
                client, model="tiny", prompt=form, max_tokens=4, temperature=0
            ).choices
        ]
        for form in forms
    ]

    assert [len(choices) for choices in texts] == [1, 1, 2, 2]
    assert len({choices[0] for choices in texts}) == 1


def test_a_stop_string_is_not_part_of_the_text(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 12, "temperature": 0}
    text = ask(client, **body).choices[0].text
    stop = next(letter for letter in text[2:] if text.count(letter) == 1 and letter != "\ufffd")

    choice = ask(client, **body, stop=[stop]).choices[0]

    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_streams_of_several_prompts_are_told_apart(http: httpx.Client) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 4, "temperature": 0}
    whole = http.post("/v1/completions", json=body).json()

    chunks = events(http.post("/v1/completions", json=body | {"stream": True}).text)

    for index in (0, 1):
        parts = [
            choice["text"]
            for chunk in chunks
            for choice in chunk["choices"]  # type: ignore[attr-defined]
            if choice["index"] == index
        ]
        assert "".join(parts) == whole["choices"][index]["text"]


def test_there_is_one_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_what_is_null_is_as_good_as_not_there(http: httpx.Client) -> None:
    fields = ("temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "max_tokens")
    more = ("stream_options", "ignore_eos", "cache_salt", "logit_bias", "stop_token_ids", "tools")
    body = {"messages": CHAT, "max_completion_tokens": 2} | dict.fromkeys(fields + more)

    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_what_asks_for_nothing_is_no_error(http: httpx.Client) -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False}
    more = {"tool_choice": "none", "tools": [{"type": "function"}], "top_logprobs": 0, "user": "me"}
    body = {"messages": CHAT, "max_tokens": 2, "temperature": 2} | neutral | more

    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_developer_is_heard_as_the_system_where_the_template_knows_no_other(
    http: httpx.Client,
) -> None:
    answers = []
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Be brief."}, *CHAT]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0}
        answers.append(http.post("/v1/chat/completions", json=body).json())

    first, second = answers
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]


@pytest.mark.slow
def test_two_hundred_answers_at_once(http: httpx.Client, url: str, engine: Engine) -> None:
    async def ask_all() -> list[int]:
        statuses: list[int] = []
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

            async def ask(seed: int) -> None:
                body = {"prompt": prompt(5, seed), "max_tokens": 4}
                statuses.append((await http.post("/v1/completions", json=body)).status_code)

            async with anyio.create_task_group() as group:
                for seed in range(200):
                    group.start_soon(ask, seed)
        return statuses

    assert anyio.run(ask_all) == [200] * 200
    assert engine.drain(60)


# ---------------------------------------------------------------- a full queue


@pytest.fixture
def gated(llama: LoadedModel) -> Iterator[Engine]:
    """An engine whose steps the test lets begin."""
    engine = make_engine(llama, GatedPages.open, engine__max_batch=2, engine__max_waiting=2)
    try:
        yield engine
    finally:
        gate(engine).open_gate()
        engine.close()


def gate(engine: Engine) -> GatedPages:
    assert isinstance(engine.cache, GatedPages)
    return engine.cache


def test_a_full_queue_says_when_to_come_back(gated: Engine) -> None:
    waiting = [gated.submit([3], GREEDY) for _ in range(2)]

    with serving(gated) as url:
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
        gate(gated).open_gate()

    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "waiting" in response.json()["error"]["message"]
    assert [list(generation)[-1].finish_reason for generation in waiting] == ["length"] * 2


# ---------------------------------------------------------------- clients that go away


def everything_is_freed(engine: Engine) -> bool:
    """Let steps begin until nobody is left, as far as an abort would; say whether all is free."""
    pages = gate(engine)
    for _ in range(400):
        pages.let(1)
        if engine.drain(0.05):
            break
    return engine.num_running == 0 and pages.num_free_pages == len(pages.device_pages)


def endless(path: str, is_batch: bool) -> dict[str, object]:
    prompts: object = [[3, 4], [5, 6]] if is_batch else [3, 4]
    if path == "/generate":
        sampling = {"max_new_tokens": 900, "ignore_eos": True}
        return {"input_ids": prompts, "sampling_params": sampling}
    return {"prompt": prompts, "max_tokens": 900, "ignore_eos": True}


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("is_batch", [False, True])
def test_a_client_that_leaves_a_stream_frees_what_it_held(
    gated: Engine, path: str, is_batch: bool
) -> None:
    body = endless(path, is_batch) | {"stream": True}

    with serving(gated) as url:
        with httpx.stream("POST", f"{url}{path}", json=body, timeout=60) as response:
            gate(gated).let(8)
            next(response.iter_lines())
        is_freed = everything_is_freed(gated)

    assert is_freed
    assert gated.counters.finished["abort"] == 1 + is_batch


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_frees_what_it_held(
    gated: Engine, path: str, is_stream: bool
) -> None:
    body = endless(path, False) | {"stream": is_stream}

    with serving(gated) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}{path}", json=body, timeout=httpx.Timeout(30, read=0.2))
        is_freed = everything_is_freed(gated)

    assert is_freed
    assert gated.counters.finished["abort"] == 1


# ---------------------------------------------------------------- failures


class FailingPages(PrivatePages):
    """Pages of which a request that asks for a fifth gets an error."""

    def extend(self, lease: Lease, num_pages: int) -> bool:
        """Raise for more than four."""
        if num_pages > 4:
            raise RuntimeError("the fifth page is broken")
        return super().extend(lease, num_pages)


def test_a_failed_step_is_an_error_of_the_server(llama: LoadedModel) -> None:
    with make_engine(llama, FailingPages.open) as engine, serving(engine) as url:
        body = {"prompt": [3] * 8, "max_tokens": 100, "ignore_eos": True}
        with httpx.Client(base_url=url, timeout=60) as http:
            whole = http.post("/v1/completions", json=body)
            stream = http.post("/v1/completions", json=body | {"stream": True})
            after = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})

    assert whole.status_code == 500
    assert "the fifth page is broken" in whole.json()["error"]["message"]
    *_, last = events(stream.text)
    assert "the fifth page is broken" in last["error"]["message"]  # type: ignore[index]
    assert after.status_code == 200


# ---------------------------------------------------------------- health and metrics


def test_health_is_good_until_the_engine_ends(llama: LoadedModel) -> None:
    engine = make_engine(llama)
    with serving(engine) as url:
        assert httpx.get(f"{url}/health").status_code == 200

        engine.close()

        assert httpx.get(f"{url}/health").status_code == 503
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


def test_metrics_are_what_prometheus_reads(http: httpx.Client, engine: Engine) -> None:
    http.post("/v1/completions", json={"prompt": [3] * 20, "max_tokens": 4, "ignore_eos": True})
    assert engine.drain(60)

    response = http.get("/metrics")

    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert all(name.startswith("hicache_") for name in families)
    hits = families["hicache_hit_tokens"].samples
    assert {sample.labels["tier"] for sample in hits} == {"device", "host", "storage"}
    outputs = families["hicache_output_tokens"].samples[0].value
    assert outputs == engine.counters.num_output_tokens
    histogram = families["hicache_time_to_first_token_seconds"].samples
    counts = [sample.value for sample in histogram if sample.name.endswith("_count")]
    assert sum(counts) > 0
