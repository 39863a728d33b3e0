"""Our own trace files: a line of what is known of the whole, then one request a line.

::

    {"hicache_trace": 1, "format": "chat", "block_size": 64, "has_times": true, ...}
    {"time_s": 0.25, "session": "0", "input": 130, "output": 40, "blocks": [0, 1, 2]}
    {"time_s": 9.5, "session": "0", "input": 201, "output": 8, "blocks": [0, 1, 3, 4], "parent": 0}

``tenant`` and ``parent`` may be left out. Ids of blocks are chained: who writes such a file gives
a block that follows other blocks another id.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, cast

from hicache.tools.traces.converting import Format, Options, has, num_blocks_of
from hicache.tools.traces.errors import BadRecord
from hicache.tools.traces.fields import Fields, items, mapping, number, text, whole
from hicache.tools.traces.normal import TraceInfo, TraceRequest

VERSION = 1


class NormalForm(Format):
    """Read as it was written, the ids included."""

    name: ClassVar[str] = "hicache"

    def __init__(self, head: Sequence[object], options: Options) -> None:
        super().__init__(head, options)
        fields = mapping(head[0])
        if fields.get("hicache_trace") != VERSION:
            raise BadRecord(f"hicache_trace: this program reads version {VERSION}")
        self._info = TraceInfo(
            format=text(fields, "format", self.name),
            block_size=whole(fields, "block_size", least=1),
            has_times=fields.get("has_times") is True,
            has_blocks=fields.get("has_blocks") is True,
            note=text(fields, "note", ""),
        )

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        return has(head[0], "hicache_trace")

    def info(self) -> TraceInfo:
        return replace(self._info)

    def convert(self, record: object) -> list[TraceRequest]:
        fields = mapping(record)
        if "hicache_trace" in fields:
            return []
        num_tokens = whole(fields, "input", least=1)
        request = TraceRequest(
            time_s=None if fields.get("time_s") is None else number(fields, "time_s"),
            session=text(fields, "session"),
            tenant=text(fields, "tenant", ""),
            num_input_tokens=num_tokens,
            num_output_tokens=whole(fields, "output", default=0),
            blocks=self._blocks(fields, num_tokens),
            parent=self._parent(fields),
        )
        return [request]

    def _blocks(self, fields: Fields, num_tokens: int) -> "array[int]":
        ids = items(fields, "blocks")
        num_blocks = num_blocks_of(num_tokens, self._info.block_size)
        if len(ids) != num_blocks:
            raise BadRecord(f"blocks: {num_tokens} tokens are {num_blocks}, found {len(ids)}")
        try:
            blocks = array("i", cast("list[int]", ids))
        except (TypeError, OverflowError) as error:
            raise BadRecord(f"blocks: {error}") from None
        if blocks and min(blocks) < 0:
            raise BadRecord("blocks: an id is negative")
        return blocks

    def _parent(self, fields: Fields) -> int | None:
        if fields.get("parent") is None:
            return None
        parent = whole(fields, "parent")
        # Where lines were left out, indices have moved; what was written before is still before.
        if parent >= self.counted.next_index:
            raise BadRecord(f"parent: request {parent} is not an earlier one")
        return parent


def written(info: TraceInfo, requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    """Give the lines of a trace file."""
    header = {
        "hicache_trace": VERSION,
        "format": info.format,
        "block_size": info.block_size,
        "has_times": info.has_times,
        "has_blocks": info.has_blocks,
        "note": info.note,
    }
    yield _line(header)
    for request in requests:
        fields: dict[str, object] = {} if request.time_s is None else {"time_s": request.time_s}
        fields["session"] = request.session
        if request.tenant:
            fields["tenant"] = request.tenant
        fields["input"] = request.num_input_tokens
        fields["output"] = request.num_output_tokens
        fields["blocks"] = request.blocks.tolist()
        if request.parent is not None:
            fields["parent"] = request.parent
        yield _line(fields)


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
