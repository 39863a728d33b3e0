"""How much a step computes after the device had no memory for more.

Pure bookkeeping. A step that runs out of memory has changed nothing, so it is tried again with
half as many tokens, down to one; a request that does not fit even so, alone, cannot be computed.
After a while of good steps it is tried with more again, since what filled the memory may be gone.
"""

GOOD_STEPS = 64
"""After so many, twice as many tokens are tried."""


class Easing:
    """A limit on the tokens of a step; none as long as nothing has gone wrong."""

    def __init__(self, chunk_tokens: int) -> None:
        self._most = chunk_tokens
        self._num_good = 0
        self.limit = chunk_tokens
        """Tokens of a step, at most."""

    def eased(self, num_tokens: int) -> bool:
        """Take note that so many were too many; False where there is no less to try."""
        self._num_good = 0
        self.limit = max(1, min(self.limit, num_tokens // 2))
        return num_tokens > 1

    def went_well(self) -> None:
        """Take note of a step that fitted."""
        if self.limit == self._most:
            return
        self._num_good += 1
        if self._num_good >= GOOD_STEPS:
            self._num_good = 0
            self.limit = min(self._most, 2 * self.limit)
