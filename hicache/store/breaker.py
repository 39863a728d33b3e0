"""The circuit breaker: when to leave a failing backend alone. Pure."""


class Breaker:
    """Open after ``max_failures`` failed calls in a row, closed again by a trial that succeeds."""

    def __init__(self, max_failures: int) -> None:
        self.is_open = False
        self._max_failures = max_failures
        self._num_failures = 0

    def failed(self) -> bool:
        """A call has failed, or was given up. Returns whether that opened the breaker."""
        self._num_failures += 1
        if self.is_open or self._num_failures < self._max_failures:
            return False
        self.is_open = True
        return True

    def succeeded(self) -> None:
        """A call has succeeded. While the breaker is open that changes nothing."""
        if not self.is_open:
            self._num_failures = 0

    def close(self) -> None:
        """A trial has succeeded."""
        self.is_open = False
        self._num_failures = 0
