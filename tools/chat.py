"""``hicache chat``: a chat with a server, and after each turn where its tokens came from.

Answers go to stdout, everything else to stderr. ``/new`` forgets the chat, ``/quit`` ends.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from hicache.errors import HiCacheError, InputError

HELP = "/new begins a new chat, /quit ends"

DEFAULT_TEMPERATURE, TOP_P = 0.2, 0.9
"""What keeps also a small model to the point."""

TIMEOUT = httpx.Timeout(10.0, read=None)
"""Connecting is quick or fails; an answer takes the time it takes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the last answer cost."""

    first_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    by_tier: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier} {count}" for tier, count in self.by_tier.items() if count)
        cached = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached"
        if tiers:
            cached += f" ({tiers})"
        if self.first_token_s is None:
            return cached
        return f"{cached}, first token after {self.first_token_s:.2f} s"


class ChatClient:
    """One chat with one server; keeps its history."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float = DEFAULT_TEMPERATURE,
    ) -> None:
        """Find the server; raise ``InputError`` in one line where there is none."""
        self._max_tokens = max_tokens
        self._temperature = temperature
        self.url = url.rstrip("/")
        self._http = httpx.Client(timeout=TIMEOUT)
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.last: Turn | None = None
        self.clear()
        try:
            self.model = model or self._first_model()
        except HiCacheError:
            self.close()
            raise

    def clear(self) -> None:
        """Forget all turns."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces. The turn enters the history once it is complete.

        Raises ``InputError`` in one line for whatever the server or the way to it has.
        """
        self.last = None
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        for piece in self._stream(messages):
            answer += piece
            yield piece
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
            "top_p": TOP_P,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.monotonic()
        first_token_s: float | None = None
        try:
            with self._http.stream(
                "POST", f"{self.url}/v1/chat/completions", json=body
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise InputError(_complaint(response))
                for line in response.iter_lines():
                    chunk = _chunk(line)
                    if piece := _text(chunk):
                        first_token_s = first_token_s or time.monotonic() - started
                        yield piece
                    if usage := chunk.get("usage"):
                        self.last = _turn(usage, first_token_s)
        except httpx.HTTPError as error:
            raise InputError(f"{self.url}: {_reason(error)}") from None

    def _first_model(self) -> str:
        try:
            response = self._http.get(f"{self.url}/v1/models")
            if response.status_code != 200:
                raise InputError(_complaint(response))
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InputError(f"{self.url}: {_reason(error)}") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise InputError(f"{self.url}: it does not answer as a server of models") from None


def run(
    url: str,
    model: str | None,
    system: str | None,
    max_tokens: int | None = None,
    temperature: float = DEFAULT_TEMPERATURE,
) -> int:
    """Chat on the terminal; return the exit code."""
    client = ChatClient(url, model, system, max_tokens, temperature)
    try:
        _say(f"{client.model} at {client.url}; {HELP}")
        while (text := _read()) is not None:
            if text == "/quit":
                break
            if text == "/new":
                client.clear()
                _say("a new chat")
            elif text.startswith("/"):
                _say(HELP)
            elif text:
                _answer(client, text)
    finally:
        client.close()
    return 0


def _answer(client: ChatClient, text: str) -> None:
    try:
        for piece in client.ask(text):
            print(piece, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        _say("stopped; this turn is not part of the chat")
    except HiCacheError as error:
        print(flush=True)
        _say(f"hicache: {error}")
    if client.last is not None:
        _say(f"[{client.last}]")


def _read() -> str | None:
    """Return a line without its ends; None at the end of input."""
    print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _chunk(line: str) -> dict[str, object]:
    """Return what a line of the stream says; raise ``InputError`` where it is an error."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return {}
    chunk = json.loads(data)
    if not isinstance(chunk, dict):
        return {}
    if isinstance(error := chunk.get("error"), dict):
        raise InputError(str(error.get("message", "the server failed")))
    return chunk


def _text(chunk: dict[str, object]) -> str:
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return ""
    return str(choices[0].get("delta", {}).get("content") or "")


def _turn(usage: object, first_token_s: float | None) -> Turn:
    assert isinstance(usage, dict)
    details = usage.get("prompt_tokens_details") or {}
    return Turn(
        first_token_s=first_token_s,
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        cached_tokens=int(details.get("cached_tokens", 0)),
        by_tier=dict(details.get("cached_tokens_details") or {}),
    )


def _complaint(response: httpx.Response) -> str:
    """Return the error of an answer, whatever form it has."""
    try:
        return f"the server answers {response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answers {response.status_code}"


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        return "there is no server (hicache serve starts one)"
    if isinstance(error, httpx.TimeoutException):
        return "it does not answer"
    return str(error) or type(error).__name__
