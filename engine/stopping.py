"""When a text ends: at a stop string, a stop token, the end of text, or its length."""

from collections.abc import Collection

from hicache.engine.detokenizing import Detokenizer
from hicache.engine.outputs import FinishReason, Output, SamplingParams


class Answer:
    """The text that a request is writing, token by token, and where it ends.

    Text that may turn out to be the beginning of a stop string is held back until that is clear.
    """

    def __init__(
        self, detokenizer: Detokenizer, params: SamplingParams, eos_token_ids: Collection[int]
    ) -> None:
        self._detokenizer = detokenizer
        self._params = params
        self._stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= frozenset(eos_token_ids)
        self._stops = tuple(stop for stop in params.stop if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._num_tokens = 0

    def is_last(self, token_id: int) -> bool:
        """Whether this token ends the text, whatever it says."""
        is_full = self._num_tokens + 1 >= self._params.max_tokens
        return is_full or token_id < 0 or token_id in self._stop_ids

    def push(self, token_id: int) -> Output:
        """Return what this token adds; its ``finish_reason`` says whether it was the last.

        The token is among the output's even where it ends the text and so has none.
        """
        if token_id < 0:  # as ``sample`` says it
            return self.end("error", "the model's logits are not numbers: it overflowed")
        self._num_tokens += 1
        if token_id in self._stop_ids:
            return self._last(self._detokenizer.end(), (token_id,), "stop", token_id)
        text = self._detokenizer.push(token_id)
        if self._num_tokens >= self._params.max_tokens:
            return self._last(text + self._detokenizer.end(), (token_id,), "length")
        text, match = self._cut(text)
        if match is not None:
            return Output(text, (token_id,), "stop", match)
        return Output(text, (token_id,))

    def end(self, reason: FinishReason, error: str | None = None) -> Output:
        """Return what was held back as the last output, without a token."""
        text = self._held + self._detokenizer.end()
        self._held = ""
        return Output(text, (), reason, error=error)

    def _last(
        self,
        text: str,
        token_ids: tuple[int, ...],
        reason: FinishReason,
        stop_match: int | None = None,
    ) -> Output:
        """Return the last output; a stop string in the last of the text goes before ``reason``."""
        text, match = self._cut(text)
        if match is not None:
            return Output(text, token_ids, "stop", match)
        text, self._held = text + self._held, ""
        return Output(text, token_ids, reason, stop_match)

    def _cut(self, text: str) -> tuple[str, str | None]:
        """Return what may be said of the text held and new, and the stop string that ends it."""
        if not self._stops or not text:
            return text, None
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that begins first; of several there, the longest.
            at, match = min(found, key=lambda item: (item[0], -len(item[1])))
            self._held = ""
            return text[:at], match
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _num_held(self, text: str) -> int:
        """Return how many last characters could be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
