"""What the server answers where a request is wrong."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from hicache.engine.model import LoadedModel
from tests.engine.kit import make_engine, serving

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
"""That the tiny model's template has no place for."""


@pytest.fixture(scope="module")
def url(llama: LoadedModel) -> Iterator[str]:
    with make_engine(llama) as engine, serving(engine) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


ERRORS: list[tuple[str, dict[str, object], int, str | None]] = [
    ("/v1/chat/completions", {"json": {"model": "gpt-5", "messages": CHAT}}, 404, "model"),
    ("/v1/completions", {"json": {"model": "gpt-5", "prompt": "a"}}, 404, "model"),
    ("/v1/chat/completions", {"content": b"{"}, 400, None),
    (
        "/v1/chat/completions",
        {"content": b"{", "headers": {"content-type": "application/json"}},
        400,
        None,
    ),
    (
        "/v1/completions",
        {"content": b"\xff\xfe", "headers": {"content-type": "application/json"}},
        400,
        None,
    ),
    ("/v1/chat/completions", {"json": []}, 400, None),
    ("/v1/chat/completions", {"json": {}}, 400, "messages"),
    ("/v1/chat/completions", {"json": {"messages": []}}, 400, "messages"),
    ("/v1/chat/completions", {"json": {"messages": [{"content": "a"}]}}, 400, "messages.0.role"),
    ("/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": 5}]}}, 400, None),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "max_tokens": "5"}}, 400, "max_tokens"),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "max_tokens": 0}}, 400, "max_tokens"),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "temperature": -1}}, 400, "temperature"),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "top_p": 0}}, 400, "top_p"),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "seed": 1.5}}, 400, "seed"),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "n": 2}}, 400, "n"),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "logprobs": True}}, 400, "logprobs"),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "temperature": 5}}, 400, "temperature"),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "tools": TOOLS}}, 400, "tools"),
    (
        "/v1/chat/completions",
        {"json": {"messages": CHAT, "tool_choice": "required"}},
        400,
        "tool_choice",
    ),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "functions": TOOLS}}, 400, "functions"),
    ("/v1/chat/completions", {"json": {"messages": CHAT, "min_p": 0.1}}, 400, "min_p"),
    (
        "/v1/chat/completions",
        {"json": {"messages": CHAT, "logit_bias": {"3": 1.0}}},
        400,
        "logit_bias",
    ),
    (
        "/v1/chat/completions",
        {"json": {"messages": [{"role": "oracle", "content": "a"}]}},
        400,
        "messages.0.role",
    ),
    (
        "/v1/completions",
        {"json": {"prompt": "a", "repetition_penalty": 1.3}},
        400,
        "repetition_penalty",
    ),
    ("/v1/completions", {"json": {"prompt": 5}}, 400, "prompt"),
    ("/v1/completions", {"json": {"prompt": []}}, 400, None),
    ("/v1/completions", {"json": {"prompt": [-1]}}, 400, None),
    ("/v1/completions", {"json": {"prompt": [10**12]}}, 400, None),
    ("/v1/completions", {"json": {"prompt": "a", "echo": True}}, 400, "echo"),
    ("/v1/completions", {"json": {"prompt": [3] * 2000}}, 400, None),
    (
        "/v1/completions",
        {
            "content": b'{"prompt": "\\ud800"}',
            "headers": {"content-type": "application/json"},
        },
        400,
        "prompt",
    ),
    ("/v1/nothing", {"json": {}}, 404, None),
    ("/generate", {"json": {"text": "a", "image_data": "b"}}, 400, "image_data"),
    (
        "/generate",
        {"json": {"text": "a", "sampling_params": {"regex": "b+"}}},
        400,
        "sampling_params.regex",
    ),
    ("/generate", {"json": {}}, 400, None),
    ("/generate", {"json": {"text": "a", "input_ids": [3]}}, 400, None),
    ("/generate", {"json": {"input_ids": []}}, 400, None),
    ("/generate", {"json": {"input_ids": [[]]}}, 400, None),
    ("/generate", {"json": {"input_ids": ["a"]}}, 400, "input_ids"),
    ("/generate", {"json": {"input_ids": [3], "sampling_params": [{}, {}]}}, 400, None),
    ("/generate", {"json": {"input_ids": [3], "return_logprob": True}}, 400, "return_logprob"),
    ("/generate", {"json": {"input_ids": [3], "lora_path": "x"}}, 400, "lora_path"),
    ("/generate", {"json": {"input_ids": [3], "sampling_params": {"n": 2}}}, 400, None),
    ("/generate", {"json": {"input_ids": [3] * 2000}}, 400, None),
    ("/flush_cache?timeout=-1", {}, 400, "timeout"),
    ("/flush_cache?timeout=nan", {}, 400, "timeout"),
]


@pytest.mark.parametrize(("path", "request_", "status", "param"), ERRORS)
def test_a_wrong_request_is_told_what_is_wrong(
    http: httpx.Client,
    path: str,
    request_: dict[str, object],
    status: int,
    param: str | None,
) -> None:
    response = http.post(path, **request_)  # type: ignore[arg-type]

    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param


def test_the_wrong_method_is_told_so(http: httpx.Client) -> None:
    response = http.get("/v1/chat/completions")

    assert response.status_code == 405
    assert response.json()["error"]["message"] == "Method Not Allowed"


def test_a_prompt_beyond_the_context_has_its_code(url: str) -> None:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as raised,
    ):
        client.completions.create(model="tiny", prompt=[3] * 1024)

    assert raised.value.code == "context_length_exceeded"
