"""SGLang's native routes, as its benchmark clients use them."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hicache.engine.engine import Engine
from hicache.engine.model import LoadedModel
from hicache.engine.outputs import SamplingParams
from tests.engine.kit import GatedPages, greedy_reference, make_engine, prompt, serving

SAMPLING = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(llama: LoadedModel) -> Iterator[Engine]:
    with make_engine(llama) as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    with serving(engine) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def generate(http: httpx.Client, **body: object) -> Any:
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, **body: object) -> list[dict[str, Any]]:
    response = http.post("/generate", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def test_one_prompt_gets_one_answer(http: httpx.Client, llama: LoadedModel) -> None:
    ids = prompt(20)

    answer = generate(http, input_ids=ids, sampling_params=SAMPLING, rid="mine")

    expected = greedy_reference(llama, ids, 6)
    assert answer["output_ids"] == expected
    assert answer["text"] == llama.decode(expected)
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (20, 6)
    assert meta["cached_tokens"] == 0
    assert meta["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 0}
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["e2e_latency"] > 0


def test_text_is_a_prompt_too(http: httpx.Client, llama: LoadedModel) -> None:
    by_text = generate(http, text="the quick", sampling_params=SAMPLING)
    by_ids = generate(http, input_ids=llama.encode("the quick"), sampling_params=SAMPLING)

    assert by_text["output_ids"] == by_ids["output_ids"]


@pytest.mark.parametrize("num_params", [1, 2])
def test_a_batch_gets_a_list(http: httpx.Client, num_params: int) -> None:
    sampling = SAMPLING if num_params == 1 else [SAMPLING, SAMPLING | {"max_new_tokens": 3}]
    ids = [prompt(9, 1), prompt(17, 2)]

    answers = generate(http, input_ids=ids, sampling_params=sampling, rid=["a", "b"])

    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [9, 17]
    assert [len(answer["output_ids"]) for answer in answers] == [6, 6 if num_params == 1 else 3]


def test_a_batch_of_one_gets_a_list_of_one(http: httpx.Client) -> None:
    assert len(generate(http, text=["a"], sampling_params=SAMPLING)) == 1


def test_a_stream_repeats_all_that_was_said(http: httpx.Client) -> None:
    ids = prompt(20)
    whole = generate(http, input_ids=ids, sampling_params=SAMPLING)

    chunks = stream(http, input_ids=ids, sampling_params=SAMPLING)

    assert [chunk["output_ids"] for chunk in chunks] == [
        whole["output_ids"][:length] for length in range(1, 7)
    ]
    assert chunks[-1]["text"] == whole["text"]
    assert all(whole["text"].startswith(chunk["text"]) for chunk in chunks[:-1])
    assert chunks[0]["meta_info"]["prompt_tokens"] == 20
    assert chunks[0]["meta_info"]["cached_tokens"] == 0
    reasons = [chunk["meta_info"]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 5 + [{"type": "length", "length": 6}]


def test_a_stream_of_a_batch_says_whose_a_chunk_is(http: httpx.Client) -> None:
    chunks = stream(http, input_ids=[prompt(5, 1), prompt(6, 2)], sampling_params=SAMPLING)

    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert [len(chunk["output_ids"]) for chunk in own] == [1, 2, 3, 4, 5, 6]


def test_what_stopped_a_text_is_said(http: httpx.Client) -> None:
    ids = prompt(20)
    first = generate(http, input_ids=ids, sampling_params=SAMPLING)["output_ids"][0]

    answer = generate(http, input_ids=ids, sampling_params=SAMPLING | {"stop_token_ids": [first]})

    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}


def test_fields_of_benchmark_clients_are_taken(http: httpx.Client) -> None:
    body = {
        "input_ids": prompt(5),
        "sampling_params": SAMPLING | {"min_new_tokens": 0, "skip_special_tokens": True},
        "lora_path": "",
        "return_logprob": False,
        "logprob_start_len": -1,
        "stream_options": {"include_usage": True},
        "image_data": None,
    }

    assert len(generate(http, **body)["output_ids"]) == 6
    assert len(stream(http, **body)) == 6


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_idle_cache_is_flushed(http: httpx.Client, method: str) -> None:
    assert http.request(method, "/flush_cache", params={"timeout": 30}).status_code == 200
    assert http.request(method, "/flush_cache").status_code == 200


def test_a_cache_in_use_is_not_flushed_at_once(llama: LoadedModel) -> None:
    engine = make_engine(llama, GatedPages.open)
    gate = engine.cache
    assert isinstance(gate, GatedPages)
    generation = engine.submit([3], SamplingParams(max_tokens=500, ignore_eos=True))
    statuses: list[int] = []

    def flush(url: str, timeout_s: float | None) -> None:
        params = {} if timeout_s is None else {"timeout": timeout_s}
        response = httpx.post(f"{url}/flush_cache", params=params, timeout=60)
        statuses.append(response.status_code)

    with serving(engine) as url, engine:
        for timeout_s in (None, 0.0):
            client = threading.Thread(target=flush, args=(url, timeout_s))
            client.start()
            while client.is_alive():
                gate.let(1)
                client.join(0.01)
        generation.abort()
        gate.open_gate()
        flush(url, 60.0)

    assert statuses == [400, 400, 200]
    assert list(generation)[-1].finish_reason == "abort"


def test_the_server_says_what_it_is(http: httpx.Client) -> None:
    info = http.get("/server_info").json()

    assert info["page_size"] == 8
    assert info["max_total_num_tokens"] == 64 * 8
    assert http.get("/get_model_info").json()["model_path"] == "tiny"
