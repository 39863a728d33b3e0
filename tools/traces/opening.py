"""Finding out what a trace file is, by its content, and reading it past what is malformed."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from os import PathLike

from hicache.errors import InputError
from hicache.tools.traces.agents import AgentSessions
from hicache.tools.traces.converting import Format, Options, Tokenizer, has
from hicache.tools.traces.errors import BadRecord
from hicache.tools.traces.hashed import KvcacheSimulator, Mooncake, QwenBailian, VllmTimed
from hicache.tools.traces.lengths import Azure, TraceLab
from hicache.tools.traces.normal import Trace, TraceInfo, TraceRequest
from hicache.tools.traces.normal_form import NormalForm
from hicache.tools.traces.sources import Record, Source
from hicache.tools.traces.texts import Messages, ShareGpt, Turns

MAX_BAD_LINES = 100
MAX_BAD_LINES_TOLD = 10
HEAD_RECORDS = 32

FORMATS: tuple[type[Format], ...] = (
    NormalForm,
    KvcacheSimulator,
    AgentSessions,
    TraceLab,
    QwenBailian,
    Mooncake,
    VllmTimed,
    Messages,
    ShareGpt,
    Turns,
    Azure,
)
"""In the order in which they are tried."""


def open_trace(
    path: str | PathLike[str],
    *,
    format: str | None = None,  # noqa: A002
    block_size: int | None = None,
    max_bad_lines: int = MAX_BAD_LINES,
    tokenizer: Tokenizer | None = None,
    sessions: int | None = None,
) -> Trace:
    """Return the trace in a file, plain or compressed with gzip or xz; ``-`` is stdin.

    ``format`` is the name of one of ``FORMATS``, by default what the content looks like.
    ``block_size`` overrides what the trace or its format says. More than ``max_bad_lines``
    malformed lines end the reading with an ``InputError``. ``tokenizer`` is for formats that are
    text; without one, a token is 4 bytes. ``sessions`` reads only the requests of the first so
    many sessions.
    """
    source = Source(path)
    options = Options(block_size, tokenizer)
    start = source.records()
    read = _head(start, source, max_bad_lines)
    head = [record.value for record in read if record.error is None]
    kind = _format(head, format, source)
    first_line = next(record.line for record in read if record.error is None)
    try:
        info = kind(head, options).info()
    except BadRecord as error:
        raise InputError(f"{source.name}:{first_line}: {error}") from None
    again = chain(read, start) if source.is_stdin else None
    if again is None:
        start.close()

    def requests() -> Iterator[TraceRequest]:
        nonlocal again
        records, again = again or source.records(), None
        reader = Reader(source.name, info, max_bad_lines)
        return reader.requests(records, kind(head, options), sessions)

    return Trace(info, requests)


class Reader:
    """One reading of a trace: counts what is malformed, and leaves it out."""

    def __init__(self, name: str, info: TraceInfo, max_bad_lines: int) -> None:
        self._name = name
        self._info = info
        self._max_bad_lines = max_bad_lines
        info.num_bad_lines = 0
        info.bad_lines.clear()

    def requests(
        self, records: Iterable[Record], kind: Format, max_sessions: int | None
    ) -> Iterator[TraceRequest]:
        """Give the requests of the first so many sessions."""
        sessions: set[str] = set()
        for record in records:
            requests = self._converted(record, kind)
            if not requests:
                continue
            if max_sessions is not None and requests[0].session not in sessions:
                if len(sessions) >= max_sessions and kind.has_whole_sessions:
                    return
                if len(sessions) >= max_sessions:
                    continue
                sessions.add(requests[0].session)
            kind.counted.next_index += len(requests)
            yield from requests

    def _converted(self, record: Record, kind: Format) -> list[TraceRequest]:
        what = record.error
        if what is None:
            try:
                return kind.convert(record.value)
            except BadRecord as error:
                what = str(error)
        self._info.num_bad_lines += 1
        told = f"{self._name}:{record.line}: {what}"
        if len(self._info.bad_lines) < MAX_BAD_LINES_TOLD:
            self._info.bad_lines.append(told)
        if self._info.num_bad_lines > self._max_bad_lines:
            raise InputError(f"{told}; more than {self._max_bad_lines} lines are malformed")
        return []


def _head(records: Iterator[Record], source: Source, max_bad_lines: int) -> list[Record]:
    """Return the first records up to the first good one; more where the lines are short."""
    read: list[Record] = []
    for record in records:
        read.append(record)
        if record.error is None:
            break
        if len(read) > max_bad_lines:
            raise InputError(f"{source.name}:{record.line}: {record.error}")
    if not read:
        raise InputError(f"{source.name}: it is empty")
    if read[-1].error is not None:
        raise InputError(f"{source.name}:{read[0].line}: {read[0].error}")
    if has(read[-1].value, "hash_ids"):
        read.extend(islice(records, HEAD_RECORDS - 1))
    return read


def _format(head: Sequence[object], name: str | None, source: Source) -> type[Format]:
    names = ", ".join(kind.name for kind in FORMATS)
    if name is not None:
        for kind in FORMATS:
            if kind.name == name:
                return kind
        raise InputError(f"{name!r} is no format of a trace: {names}")
    for kind in FORMATS:
        if kind.recognises(head):
            return kind
    raise InputError(f"{source.name}: it looks like none of {names}")
