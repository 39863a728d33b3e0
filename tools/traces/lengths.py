"""Formats that give lengths and no content.

TraceLab's rounds say how many tokens a provider's cache had: the blocks are made up so that a
round shares as much with the one before it. Azure's tables say nothing of sharing at all.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hicache.tools.traces.converting import Format, Options, has, num_blocks_of
from hicache.tools.traces.errors import BadRecord
from hicache.tools.traces.fields import Fields, items, mapping, moment, name_of, text, whole
from hicache.tools.traces.normal import TraceInfo, TraceRequest

DEFAULT_BLOCK = 64
AZURE_HEADER = ["timestamp", "contexttokens", "generatedtokens"]


@dataclass(slots=True)
class Session:
    """Where a session of rounds has come to."""

    start_s: float | None
    index: int
    num_tokens: int
    blocks: "array[int]"


class TraceLab(Format):
    """One round of an agent a line; rounds of one session follow each other."""

    name: ClassVar[str] = "tracelab"

    def __init__(self, head: Sequence[object], options: Options) -> None:
        super().__init__(head, options)
        self.block_size = options.block_size or DEFAULT_BLOCK
        self._sessions: dict[str, Session] = {}

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        return has(head[0], "session_id", "prefix_tokens", "newly_append_tokens")

    def info(self) -> TraceInfo:
        note = (
            "blocks are made up from lengths: a round shares with the one before it what the"
            " provider's cache had, and sessions share nothing"
        )
        return TraceInfo(self.name, self.block_size, has_times=False, has_blocks=True, note=note)

    def convert(self, record: object) -> list[TraceRequest]:
        fields = mapping(record)
        session = name_of(fields, "session_id") or ""
        prefix = whole(fields, "prefix_tokens")
        num_tokens = prefix + whole(fields, "newly_append_tokens")
        num_output_tokens = whole(fields, "output_tokens", default=0)
        if not num_tokens:
            raise BadRecord("prefix_tokens and newly_append_tokens: a round of no tokens")
        absolute_s = _start_s(fields)
        before = self._sessions.get(session)
        num_shared = min(prefix, before.num_tokens) // self.block_size if before else 0
        blocks = before.blocks[:num_shared] if before else array("i")
        num_new = num_blocks_of(num_tokens, self.block_size) - num_shared
        blocks.extend(self.counted.ids.fresh(num_new))
        start_s = before.start_s if before else absolute_s
        time_s = None if absolute_s is None or start_s is None else absolute_s - start_s
        self._sessions[session] = Session(start_s, self.counted.next_index, num_tokens, blocks)
        parent = before.index if before else None
        return [TraceRequest(time_s, session, "", num_tokens, num_output_tokens, blocks, parent)]


def _start_s(fields: Fields) -> float | None:
    """Return when a round's last input was there, which is when it was sent."""
    if not fields.get("timing_events"):
        return None
    inputs = [
        text(mapping(event), "timestamp")
        for event in items(fields, "timing_events")
        if mapping(event).get("event_type") in ("user_message", "tool_result")
    ]
    return moment(max(inputs), "timing_events") if inputs else None


class Azure(Format):
    """Azure's tables of when a request came and how long it was."""

    name: ClassVar[str] = "azure"

    def __init__(self, head: Sequence[object], options: Options) -> None:
        super().__init__(head, options)
        self.block_size = options.block_size or DEFAULT_BLOCK
        self._start_s: float | None = None

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        return _is_header(head[0])

    def info(self) -> TraceInfo:
        note = "lengths only: nothing can be shared"
        return TraceInfo(self.name, self.block_size, has_times=True, has_blocks=False, note=note)

    def convert(self, record: object) -> list[TraceRequest]:
        if _is_header(record):
            return []
        cells = _cells(record) if isinstance(record, str) else []
        if len(cells) != len(AZURE_HEADER):
            raise BadRecord(f"expected 3 columns, found {len(cells)}")
        absolute_s = moment(cells[0], "TIMESTAMP")
        counts = {"ContextTokens": _count(cells[1]), "GeneratedTokens": _count(cells[2])}
        num_tokens = whole(counts, "ContextTokens", least=1)
        num_output_tokens = whole(counts, "GeneratedTokens")
        if self._start_s is None:
            self._start_s = absolute_s
        blocks = self.counted.ids.fresh(num_blocks_of(num_tokens, self.block_size))
        session = str(self.counted.next_index)
        time_s = absolute_s - self._start_s
        return [TraceRequest(time_s, session, "", num_tokens, num_output_tokens, blocks)]


def _is_header(record: object) -> bool:
    return isinstance(record, str) and _cells(record.lower()) == AZURE_HEADER


def _cells(line: str) -> list[str]:
    return [cell.strip().strip('"') for cell in line.split(",")]


def _count(cell: str) -> int | str:
    return int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 20 else cell
