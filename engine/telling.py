"""From tokens to their readers: at once, or while the next step computes.

A request has a token as soon as it is chosen, for the next step needs it. Its text can come later:
on a GPU it is made while the next forward runs. Then a text may turn out to have ended when one
more token is being computed, which is thrown away.
"""

from collections.abc import Callable, Mapping

from hicache.engine.counters import Counters
from hicache.engine.outputs import Output
from hicache.engine.requests import Request
from hicache.events import RequestId


class Teller:
    """Tokens that their requests have and their readers have not. Step thread only."""

    def __init__(
        self,
        requests: Mapping[RequestId, Request],
        finish: Callable[[Request, Output], None],
        counters: Counters,
        clock: Callable[[], float],
        *,
        is_late: bool,
    ) -> None:
        """``requests`` are those that have not ended; ``finish`` ends one with its last output."""
        self._requests = requests
        self._finish = finish
        self._counters = counters
        self._clock = clock
        self._is_late = is_late
        self._untold: list[tuple[Request, int]] = []  # oldest first

    def say(self, request: Request, token_id: int) -> None:
        """Add a token to a request; tell its reader now, or at the next ``tell``.

        First tokens, which somebody waits for, and last ones are told now.
        """
        is_first = request.generation.timing.first_token is None
        is_last = request.answer.is_last(token_id)
        if token_id >= 0:
            request.append(token_id)
            self._counters.num_output_tokens += 1
        self._untold.append((request, token_id))
        if is_first or is_last or not self._is_late:
            self.tell()

    def tell(self) -> None:
        """Tell readers all that they were not told yet, and end requests whose text ends."""
        untold, self._untold = self._untold, []
        for request, token_id in untold:
            if request.id not in self._requests:
                continue
            is_first = request.generation.timing.first_token is None
            output = request.answer.push(token_id)
            if output.finish_reason is None:
                request.generation.put(output, self._clock())
            else:
                self._finish(request, output)
            if is_first and token_id >= 0:
                generation = request.generation
                self._counters.count_first_token(generation.hit, generation.timing)
