"""Finding out what a trace file is, by its content."""

from collections.abc import Callable, Sequence
from os import PathLike

from hicache.tools.traces.normal import Trace

MAX_BAD_LINES = 100

Tokenizer = Callable[[str], Sequence[int]]
"""Text to token ids."""


def open_trace(
    path: str | PathLike[str],
    *,
    format: str | None = None,  # noqa: A002
    max_bad_lines: int = MAX_BAD_LINES,
    tokenizer: Tokenizer | None = None,
    sessions: int | None = None,
) -> Trace:
    """Return the trace in a file, plain or compressed with gzip or xz; ``-`` is stdin.

    ``format`` is the name of one of ``FORMATS``, by default what the content looks like. More
    than ``max_bad_lines`` malformed lines end the reading with an ``InputError``. ``tokenizer``
    is for formats that are text; without one, a token is 4 bytes. ``sessions`` reads only the
    requests of the first so many sessions.
    """
    raise NotImplementedError
