"""OpenAI's chat completions, completions and models."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from hicache.engine.completion import Completion
from hicache.engine.engine import Engine
from hicache.engine.generation import Generation
from hicache.engine.http_errors import UnknownModel, failed_body
from hicache.engine.openai_types import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Unsupported,
    check_unicode,
)
from hicache.engine.outputs import Output
from hicache.engine.streaming import DONE, EventStream, completed, merged
from hicache.engine.submitting import submit_all
from hicache.errors import InputError

JSON = dict[str, object]

COMPLETION_TOKENS = 16
"""What OpenAI generates where a plain completion does not say."""


def router(engine: Engine) -> APIRouter:
    """Return the routes under ``/v1``."""
    routes = APIRouter(prefix="/v1")
    card: JSON = {
        "id": engine.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "hicache",
        "max_model_len": engine.context_tokens,
    }

    @routes.get("/models")
    async def models() -> JSON:
        return {"object": "list", "data": [card]}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> JSON:
        _check_model(engine, name)
        return card

    @routes.post("/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        _check(engine, body)
        prompt = await run_in_threadpool(_render, engine, body)
        return await _answer(engine, request, body, [prompt], Chat())

    @routes.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        _check(engine, body)
        prompts = await run_in_threadpool(_encode, engine, body)
        return await _answer(engine, request, body, prompts, Plain())

    return routes


class Form(Protocol):
    """How a kind of answer is written down."""

    prefix: str
    """Of its ids."""
    name: str
    """Of the whole object."""
    chunk_name: str
    """Of a part of a stream."""
    max_tokens: int | None
    """Where the client does not say; None: as many as the context holds."""

    def first(self, index: int) -> JSON | None:
        """Return what a stream begins with."""
        ...

    def part(self, index: int, text: str, reason: str | None) -> JSON:
        """Return one choice of a stream."""
        ...

    def choice(self, index: int, text: str, reason: str | None) -> JSON:
        """Return one choice of the whole."""
        ...


class Chat:
    """Chat completions."""

    prefix = "chatcmpl"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    max_tokens: int | None = None

    def first(self, index: int) -> JSON | None:
        """Return who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, text: str, reason: str | None) -> JSON:
        """Return a delta."""
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def choice(self, index: int, text: str, reason: str | None) -> JSON:
        """Return a message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}


class Plain:
    """Plain completions."""

    prefix = "cmpl"
    name = "text_completion"
    chunk_name = "text_completion"
    max_tokens: int | None = COMPLETION_TOKENS

    def first(self, index: int) -> JSON | None:
        """Return nothing: text begins at once."""
        return None

    def part(self, index: int, text: str, reason: str | None) -> JSON:
        """Return text."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def choice(self, index: int, text: str, reason: str | None) -> JSON:
        """Return text."""
        return self.part(index, text, reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its name, when it began, its form."""

    id: str
    created: int
    model: str
    form: Form

    def whole(self, completions: Sequence[Completion]) -> JSON:
        """Return the answer as one object."""
        choices = [
            self.form.choice(index, completion.text, completion.finish_reason)
            for index, completion in enumerate(completions)
        ]
        generations = [completion.generation for completion in completions]
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        return self._object(self.form.name, choices) | {"usage": usage(generations, num_tokens)}

    async def stream(
        self, generations: Sequence[Generation], wants_usage: bool
    ) -> AsyncIterator[str]:
        """Yield the answer as events."""
        num_tokens = 0
        for index in range(len(generations)):
            if (first := self.form.first(index)) is not None:
                yield self._chunk([first], wants_usage)
        async for index, output in merged(generations):
            num_tokens += len(output.token_ids)
            if output.finish_reason == "error":
                yield event(failed_body(output.error or "failed"))
                yield DONE
                return
            if output.text or output.finish_reason is not None:
                yield self._chunk(self._parts(index, output), wants_usage)
        if wants_usage:
            last = self._object(self.form.chunk_name, [])
            yield event(last | {"usage": usage(generations, num_tokens)})
        yield DONE

    def _parts(self, index: int, output: Output) -> list[JSON]:
        return [self.form.part(index, output.text, output.finish_reason)]

    def _chunk(self, choices: list[JSON], wants_usage: bool) -> str:
        chunk = self._object(self.form.chunk_name, choices)
        return event(chunk | {"usage": None} if wants_usage else chunk)

    def _object(self, name: str, choices: list[JSON]) -> JSON:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def event(body: JSON) -> str:
    """Return JSON as a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def usage(generations: Sequence[Generation], num_output_tokens: int) -> JSON:
    """Return what was used, and where what was cached came from."""
    prompt_tokens = sum(generation.prompt_tokens for generation in generations)
    hits = [generation.hit for generation in generations]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(hit.total for hit in hits),
            "cached_tokens_details": {
                "device": sum(hit.device for hit in hits),
                "host": sum(hit.host for hit in hits),
                "storage": sum(hit.storage for hit in hits),
            },
        },
    }


def _check(engine: Engine, body: GenerationBody) -> None:
    if body.model is not None:
        _check_model(engine, body.model)
    body.check()


def _check_model(engine: Engine, name: str) -> None:
    if name != engine.model_name:
        raise UnknownModel(f"the model {name!r} does not exist; there is {engine.model_name!r}")


def _render(engine: Engine, body: ChatBody) -> list[int]:
    template = engine.model.template
    tools = None if body.tool_choice == "none" else body.tools
    if tools and not template.reads("tools"):
        raise Unsupported("tools", "the model's chat template has no place for them")
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    for message in messages:
        if message["role"] == "developer" and not template.reads("developer"):
            message["role"] = "system"  # its name before
    check_unicode("messages", messages, tools, body.chat_template_kwargs)
    return template.render(messages, tools, options=body.chat_template_kwargs)


def _encode(engine: Engine, body: CompletionBody) -> list[list[int]]:
    prompts = body.prompts()
    check_unicode("prompt", *(item for item in prompts if isinstance(item, str)))
    if not prompts:
        raise InputError("prompt: there is none")
    return [engine.model.encode(item) if isinstance(item, str) else item for item in prompts]


async def _answer(
    engine: Engine,
    request: Request,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    form: Form,
) -> Response:
    params = body.params(form.max_tokens or engine.context_tokens)
    name = f"{form.prefix}-{uuid4().hex}"
    generations = submit_all(
        engine,
        [(prompt, params) for prompt in prompts],
        salt=body.cache_salt,
        priority=body.priority,
        name=name,
    )
    answer = Answer(name, int(time.time()), engine.model_name, form)
    if body.stream:
        return EventStream(answer.stream(generations, body.wants_usage), generations)
    completions = await completed(request, generations)
    for completion in completions:
        if completion.finish_reason == "error":
            return JSONResponse(failed_body(completion.error or "failed"), 500)
    return JSONResponse(answer.whole(completions))
