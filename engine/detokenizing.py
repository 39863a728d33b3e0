"""Text from tokens as they come: whole characters only, and nothing twice.

A token alone has no text: a character can be several tokens, and some tokenizers write a space
before a token only where another one is before it. So a token is decoded together with the few
before it, and what it adds is the difference.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What stands in a text for bytes that are no character: perhaps not yet."""

_CONTEXT = 6
"""Tokens of the prompt that decide about the first space."""

_MAX_HELD = 8
"""Tokens that may wait to become a character. A character has 4 bytes, so more are no text."""

_CHARACTER = 4
"""Tokens that one character can have."""


class Detokenizer:
    """The text of one growing sequence. O(1) a token, whatever the tokens are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int] = ()) -> None:
        """``prompt_ids`` came before; they matter for the space before the first word only."""
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        context = list(prompt_ids[-_CONTEXT:])
        for index in range(len(context) - 1, -1, -1):
            if context[index] in self._special:
                context = context[index + 1 :]
                break
        if self._decode(context).endswith(BROKEN):
            context = []
        self._ids = context
        """The tokens decoded together: those that are said, then those that are held."""
        self._num_said = len(context)

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes; special tokens have none."""
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        text = self._held()
        if text and not text.endswith(BROKEN):
            return self._say(text, len(self._ids))
        if len(self._ids) - self._num_said <= _MAX_HELD:
            return ""
        # No character is that long. Say what can be none any more.
        end = len(self._ids) - _CHARACTER
        text = self._decode(self._ids[:end])[len(self._decode(self._ids[: self._num_said])) :]
        return self._say(text, end)

    def end(self) -> str:
        """Return what was held back, broken or not: no token follows."""
        return self._say(self._held(), len(self._ids))

    def _held(self) -> str:
        """Return the text of what is not said yet."""
        said = self._decode(self._ids[: self._num_said])
        return self._decode(self._ids)[len(said) :]

    def _say(self, text: str, num_said: int) -> str:
        """Note that the text of the first ``num_said`` tokens is said now."""
        self._ids = self._ids[self._num_said :]
        self._num_said = num_said - self._num_said
        return text

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
