"""Chats as tokens: the template that a model brings along."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hicache.errors import InputError

Message = Mapping[str, object]
"""``role``, ``content`` (text, or a list of text parts), and whatever else the template reads."""

_PROBE = "only the reasoning says this"
_ANSWER = "the answer says this"
_MARKERS = (
    ("<think>", "</think>"),
    ("<reasoning>", "</reasoning>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis", "<|end|>"),
)
"""How models begin and end what they reason before they answer."""


class ChatTemplate:
    """Renders chats with a tokenizer's own template, and knows what it leaves out of history."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._apply: Any = tokenizer.apply_chat_template
        self._reserved = frozenset(inspect.signature(self._apply).parameters)
        self.drops_reasoning = False
        """Whether a turn's reasoning is missing when that turn has become history."""
        self.reasoning_ids: tuple[int, ...] = ()
        """The tokens that begin it, where it is dropped."""
        if self.exists:
            self._detect()

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a template at all."""
        return bool(self._tokenizer.chat_template)

    def reads(self, word: str) -> bool:
        """Whether the template says this word anywhere: a variable, or a role."""
        return word in str(self._tokenizer.chat_template or "")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the tokens of a chat.

        ``options`` are the template's own variables (``enable_thinking``). Raises ``InputError``
        where the model has no template or the template refuses the messages.
        """
        text = self.render_text(messages, tools, add_generation_prompt, options)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return a chat as the text that ``render`` makes tokens of."""
        if not self.exists:
            raise InputError("the model has no chat template: send a prompt, not messages")
        if not messages:
            raise InputError("messages: there are none")
        if taken := sorted(self._reserved & set(options or ())):
            raise InputError(f"no variable of a chat template: {', '.join(taken)}")
        try:
            text = self._apply(
                [_flat(message) for message in messages],
                tools=None if not tools else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **dict(options or {}),
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            line = " ".join(str(error).split())
            raise InputError(f"messages: the model's chat template refuses them: {line}") from None
        assert isinstance(text, str)
        return text

    def dropped_from(self, token_ids: Sequence[int], start: int = 0) -> int | None:
        """Return where the first reasoning at or after ``start`` begins that history will lack.

        ``None`` where there is none, or where the template keeps it.
        """
        if not self.drops_reasoning:
            return None
        opening = list(self.reasoning_ids)
        for at in range(start, len(token_ids) - len(opening) + 1):
            if token_ids[at] == opening[0] and list(token_ids[at : at + len(opening)]) == opening:
                return at
        return None

    def _detect(self) -> None:
        template = str(self._tokenizer.chat_template)
        for opening, closing in _MARKERS:
            if opening in template and self._drops(opening, closing):
                ids = self._tokenizer.encode(opening, add_special_tokens=False)
                self.drops_reasoning, self.reasoning_ids = True, tuple(ids)
                return

    def _drops(self, opening: str, closing: str) -> bool:
        """Try it: what is left of a reasoned turn when another turn follows?"""
        question = {"role": "user", "content": "a question"}
        forms: tuple[Message, ...] = (
            {"content": f"{opening}\n{_PROBE}\n{closing}\n\n{_ANSWER}"},
            {"content": _ANSWER, "reasoning_content": _PROBE},
            {"content": _ANSWER, "thinking": _PROBE},
        )
        for form in forms:
            try:
                text = self.render_text([question, {"role": "assistant", **form}, question])
            except InputError:
                continue
            if _ANSWER in text:
                return _PROBE not in text
        return False


def _flat(message: Message) -> dict[str, object]:
    """Return a message whose content is text, where it was a list of text parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InputError("messages: only text is understood, and a part is something else")
        texts.append(text)
    return {**message, "content": "".join(texts)}
