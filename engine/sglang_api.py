"""SGLang's native routes, as its benchmark clients use them."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from hicache.engine.completion import Completion
from hicache.engine.engine import Engine
from hicache.engine.http_errors import error_body, failed_body
from hicache.engine.openai_api import JSON, event
from hicache.engine.openai_types import Body, Unsupported, check_asked, check_unicode
from hicache.engine.outputs import SamplingParams
from hicache.engine.streaming import DONE, EventStream, completed, merged
from hicache.engine.submitting import submit_all
from hicache.errors import InputError


class Sampling(Body):
    """``sampling_params`` of one prompt."""

    model_config = ConfigDict(strict=True, extra="allow")

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    max_new_tokens: Annotated[int, Field(ge=1)] | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: int = 1

    def params(self, max_tokens: int) -> SamplingParams:
        """Return how to sample; ``max_tokens`` where there is no limit."""
        if self.n != 1:
            raise Unsupported("sampling_params.n", "only 1 is supported")
        check_asked(self.model_extra, "sampling_params.")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            seed=self.sampling_seed,
            max_tokens=self.max_new_tokens or max_tokens,
            stop=tuple(text for text in stop if text),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )


class GenerateBody(Body):
    """``POST /generate``: one prompt, or a list of them."""

    model_config = ConfigDict(strict=True, extra="allow")

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: Sampling | list[Sampling] | None = None
    stream: bool = False
    rid: str | list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    lora_path: str | list[str | None] | None = None
    return_logprob: bool | list[bool] | None = None

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and (self.text is not None or isinstance(given[0], list))

    def check(self) -> None:
        """Raise ``InputError`` for what cannot be honoured."""
        if (self.text is None) == (self.input_ids is None):
            raise InputError("one of text and input_ids is needed")
        if not self.text and not self.input_ids:
            raise InputError("the prompt is empty")
        check_asked(self.model_extra)
        check_unicode("rid", self.rid)
        if self.lora_path not in (None, "") and self.lora_path != []:
            raise Unsupported("lora_path", "is not supported")
        if self.return_logprob is True or self.return_logprob == [True]:
            raise Unsupported("return_logprob", "is not supported")

    def prompts(self, engine: Engine) -> list[list[int]]:
        """Return the prompts as tokens."""
        if self.text is not None:
            check_unicode("text", self.text)
            texts = [self.text] if isinstance(self.text, str) else self.text
            return [engine.model.encode(text) for text in texts]
        lists = [item for item in self.input_ids or () if isinstance(item, list)]
        return lists or [[item for item in self.input_ids or () if isinstance(item, int)]]

    def params(self, num_prompts: int, max_tokens: int) -> list[SamplingParams]:
        """Return how to sample each prompt."""
        given = self.sampling_params
        if not isinstance(given, list):
            return [(given or Sampling()).params(max_tokens)] * num_prompts
        if len(given) != num_prompts:
            raise InputError(f"sampling_params: {len(given)} for {num_prompts} prompts")
        return [item.params(max_tokens) for item in given]


def router(engine: Engine) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post("/generate")
    async def generate(request: Request, body: GenerateBody) -> Response:
        return await _generate(engine, request, body)

    @routes.get("/flush_cache")
    @routes.post("/flush_cache")
    async def flush_cache(timeout: Annotated[float | None, Query(ge=0)] = None) -> Response:
        if await run_in_threadpool(engine.flush, timeout):
            return JSONResponse({"success": True, "message": "L1 and L2 are empty"})
        message = "requests are running: the cache was not flushed"
        return JSONResponse(error_body(message, "invalid_request_error"), 400)

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    async def server_info() -> JSON:
        return engine.info()

    @routes.get("/get_model_info")
    async def model_info() -> JSON:
        return {"model_path": engine.model_name, "is_generation": True}

    return routes


async def _generate(engine: Engine, request: Request, body: GenerateBody) -> Response:
    body.check()
    prompts = await run_in_threadpool(body.prompts, engine)
    params = body.params(len(prompts), engine.context_tokens)
    generations = submit_all(
        engine,
        list(zip(prompts, params, strict=True)),
        salt=body.cache_salt,
        priority=body.priority or 0,
        name=body.rid or uuid4().hex,
    )
    completions = [Completion(generation) for generation in generations]
    if body.stream:
        return EventStream(_stream(completions, body.is_batch), generations)
    completions = await completed(request, generations)
    for completion in completions:
        if completion.finish_reason == "error":
            return JSONResponse(failed_body(completion.error or "failed"), 500)
    answers = [_answer(completion) for completion in completions]
    return JSONResponse(answers if body.is_batch else answers[0])


async def _stream(completions: Sequence[Completion], is_batch: bool) -> AsyncIterator[str]:
    """Yield events; text and tokens in each are all there are so far."""
    async for index, output in merged([completion.generation for completion in completions]):
        completion = completions[index]
        completion.add(output)
        if completion.finish_reason == "error":
            yield event(failed_body(completion.error or "failed"))
            break
        answer = _answer(completion)
        yield event(answer | {"index": index} if is_batch else answer)
    yield DONE


def _answer(completion: Completion) -> JSON:
    hit = completion.hit
    meta: JSON = {
        "id": completion.generation.id,
        "finish_reason": _finish_reason(completion),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "cached_tokens": hit.total,
        "cached_tokens_details": {
            "device": hit.device,
            "host": hit.host,
            "storage": hit.storage,
        },
        "e2e_latency": _latency_s(completion),
    }
    return {"text": completion.text, "output_ids": completion.token_ids, "meta_info": meta}


def _latency_s(completion: Completion) -> float:
    timing = completion.timing
    return (timing.finished or time.monotonic()) - timing.arrived


def _finish_reason(completion: Completion) -> JSON | None:
    reason = completion.finish_reason
    if reason is None:
        return None
    if reason == "length":
        return {"type": "length", "length": len(completion.token_ids)}
    if reason == "stop":
        return {"type": "stop", "matched": completion.stop_match}
    return {"type": "abort", "message": "the request was aborted"}
