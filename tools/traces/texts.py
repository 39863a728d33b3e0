"""Formats that are text: message lists of chats. Each turn is a request with all before it.

A message becomes a header with its role, its content, and its tool calls; no chat template is
applied, so that counts are a little lower than a server's. Without a tokenizer, 4 bytes are a
token.
"""

import json
from array import array
from collections.abc import Sequence
from typing import ClassVar

import xxhash

from hicache.tools.traces.chaining import Chain
from hicache.tools.traces.converting import Format, Options, has
from hicache.tools.traces.errors import BadRecord
from hicache.tools.traces.fields import Fields, items, mapping, name_of, text
from hicache.tools.traces.normal import TraceInfo, TraceRequest

DEFAULT_BLOCK = 64
BYTES_A_TOKEN = 4
ASSISTANTS = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model"})
ROLES = {"human": "user"}


class Messages(Format):
    """OpenAI's message lists: the object of a request, or the bare list."""

    name: ClassVar[str] = "openai-messages"
    has_whole_sessions = True
    is_answered: ClassVar[bool] = True

    def __init__(self, head: Sequence[object], options: Options) -> None:
        super().__init__(head, options)
        self.block_size = options.block_size or DEFAULT_BLOCK
        self._tokenizer = options.tokenizer
        self._chain = Chain(self.counted.ids)

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        first = head[0]
        if isinstance(first, list) and first:
            return has(first[0], "role")
        return has(first, "messages")

    def info(self) -> TraceInfo:
        note = "text, " + ("tokenised" if self._tokenizer else "taken as 4 bytes a token")
        if not self.is_answered:
            note += "; without answers, so that a turn holds only the questions before it"
        return TraceInfo(self.name, self.block_size, has_times=False, has_blocks=True, note=note)

    def convert(self, record: object) -> list[TraceRequest]:
        session, messages = self.conversation(record)
        context = Context(self.block_size * BYTES_A_TOKEN)
        turns: list[TraceRequest] = []
        for index, (role, content) in enumerate(messages):
            message = self._packed(f"{role}:\n{content}\n")
            is_answer = role == "assistant"
            is_asked = index == len(messages) - 1 or not self.is_answered
            if is_answer and context.nbytes:
                turns.append(self._turn(context, len(message), session, len(turns)))
            context.append(message)
            if not is_answer and is_asked:
                turns.append(self._turn(context, 0, session, len(turns)))
        return turns

    def conversation(self, record: object) -> tuple[str | None, list[tuple[str, str]]]:
        """Return a conversation's name and its messages, each a role and a text."""
        name = None if isinstance(record, list) else name_of(mapping(record), "id")
        found = record if isinstance(record, list) else items(mapping(record), "messages")
        messages = [mapping(message) for message in found]
        return name, [(text(message, "role"), _content(message)) for message in messages]

    def _packed(self, message: str) -> bytes:
        """Return 4 bytes a token."""
        if self._tokenizer is not None:
            return array("i", self._tokenizer(message)).tobytes()
        # Broken surrogates are possible in JSON; a message ends on a whole token.
        encoded = message.encode("utf-8", errors="replace")
        return encoded + b"\0" * (-len(encoded) % BYTES_A_TOKEN)

    def _turn(
        self, context: "Context", answer_nbytes: int, session: str | None, turn: int
    ) -> TraceRequest:
        index = self.counted.next_index
        return TraceRequest(
            time_s=None,
            session=session or f"session {index}",
            tenant="",
            num_input_tokens=context.nbytes // BYTES_A_TOKEN,
            num_output_tokens=answer_nbytes // BYTES_A_TOKEN,
            blocks=self._chain.chained(context.hashes()),
            parent=index + turn - 1 if turn else None,
        )


class Context:
    """A conversation so far: hashes of its full blocks, and the bytes after them."""

    def __init__(self, block_nbytes: int) -> None:
        self.nbytes = 0
        self._block_nbytes = block_nbytes
        self._full: list[int] = []
        self._rest = b""

    def append(self, message: bytes) -> None:
        """Add a message; its cost does not depend on what is there."""
        self.nbytes += len(message)
        rest, size = self._rest + message, self._block_nbytes
        end = len(rest) // size * size
        self._full.extend(_hash(rest[start : start + size]) for start in range(0, end, size))
        self._rest = rest[end:]

    def hashes(self) -> list[int]:
        """Return the hash of every block, the last one's too."""
        return [*self._full, _hash(self._rest)] if self._rest else list(self._full)


class ShareGpt(Messages):
    """ShareGPT's conversations."""

    name = "sharegpt"

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        return has(head[0], "conversations")

    def conversation(self, record: object) -> tuple[str | None, list[tuple[str, str]]]:
        fields = mapping(record)
        messages = [mapping(message) for message in items(fields, "conversations")]
        return name_of(fields, "id"), [
            (_role(text(message, "from")), text(message, "value")) for message in messages
        ]


class Turns(Messages):
    """MT-Bench's questions: what the user says in each turn, without answers."""

    name = "mt-bench"
    is_answered = False

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        return has(head[0], "turns")

    def conversation(self, record: object) -> tuple[str | None, list[tuple[str, str]]]:
        fields = mapping(record)
        turns = items(fields, "turns")
        messages = [text({"turns": turn}, "turns") for turn in turns]
        return name_of(fields, "question_id"), [("user", message) for message in messages]


def _hash(block: bytes) -> int:
    """Return 62 bits: few enough for a Python int that is cheap to keep."""
    return xxhash.xxh3_64_intdigest(block) >> 2


def _role(name: str) -> str:
    return "assistant" if name in ASSISTANTS else ROLES.get(name, name)


def _content(message: Fields) -> str:
    """Return a message's text: its parts one after the other, and its tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [mapping(part) for part in content]
        content = "\n".join(str(part.get("text") or json.dumps(part)) for part in parts)
    if content is not None and not isinstance(content, str):
        raise BadRecord("content: expected a text or a list of parts")
    calls = message.get("tool_calls") or message.get("function_call")
    return (content or "") + (json.dumps(calls) if calls else "")
