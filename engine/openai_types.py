"""What OpenAI's clients send, as far as it changes what is generated.

Fields that nobody knows are ignored, as everybody does; those that other servers know and we
cannot honour are refused where they ask for something, because an answer without it would be wrong.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hicache.engine.outputs import SamplingParams
from hicache.errors import InputError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "ebnf": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "image_data": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_logprobs": (False, 0),
    "regex": (),
    "repetition_penalty": (1,),
    "structured_outputs": (),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""What clients may ask for and we cannot do, each with the values that ask for nothing."""


class Unsupported(InputError):
    """A parameter that we know and cannot honour."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(f"{param}: {why}")
        self.param = param


class Body(BaseModel):
    """JSON with exact types: a string is no number."""

    model_config = ConfigDict(strict=True, extra="ignore")


def check_asked(given: Mapping[str, object] | None, prefix: str = "") -> None:
    """Raise ``Unsupported`` where fields that we know by name only ask for something."""
    for name, value in (given or {}).items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise Unsupported(prefix + name, "is not supported")


def check_unicode(param: str, *values: object) -> None:
    """Raise ``InputError`` where a text has half a surrogate pair, which JSON can spell."""
    for value in values:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Unsupported(param, "half a surrogate pair is no character") from None


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool = False


class Message(Body):
    """One turn of a chat; the template reads whatever else is in it."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, object]] | None = None


class GenerationBody(Body):
    """What chats and plain completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """An extension; 0 and -1 are off."""
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    """An extension."""
    ignore_eos: bool | None = None
    """An extension."""
    cache_salt: str | None = None
    """An extension: only requests with the same salt share KV."""
    priority: int = 0
    """An extension: larger is sooner."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None

    def check(self) -> None:
        """Raise ``Unsupported`` for what cannot be honoured."""
        if self.n not in (None, 1):
            raise Unsupported("n", "only 1 is supported")
        check_asked(self.model_extra)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk about usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit(self) -> int | None:
        """How many tokens were asked for."""
        return self.max_tokens

    def params(self, max_tokens: int) -> SamplingParams:
        """Return how to sample; ``max_tokens`` where none is asked for."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            max_tokens=self.limit or max_tokens,
            stop=tuple(text for text in stop if text),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, object]] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    """An extension: options of the model's own template."""
    tool_choice: str | dict[str, object] | None = None
    response_format: dict[str, object] | None = None

    def check(self) -> None:
        """Raise ``Unsupported`` for what cannot be honoured."""
        super().check()
        if self.tool_choice not in (None, "none", "auto"):
            raise Unsupported("tool_choice", "only none and auto are supported")
        if self.response_format and self.response_format.get("type") != "text":
            raise Unsupported("response_format", "only text is supported")

    @property
    def limit(self) -> int | None:
        """How many tokens were asked for."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raise ``Unsupported`` for what cannot be honoured."""
        super().check()
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise Unsupported(name, "is not supported")
        if self.best_of not in (None, 1):
            raise Unsupported("best_of", "only 1 is supported")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [item for item in self.prompt if isinstance(item, str)]
        lists = [item for item in self.prompt if isinstance(item, list)]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [*texts, *lists] if not ids else [ids]
