"""Formats with one request a line and a hash for each block: they differ in what a block is.

Mooncake: 512 tokens, milliseconds, hashes of the whole prefix. Qwen-Bailian: 16 tokens, seconds,
hashes of a block alone, and which request each continues. vLLM's timed traces: the fields of
Mooncake, but a block of any size, and times in either unit. kvcache-simulator: the block size in
every line or in one of them, times that its authors ignore.
"""

from collections.abc import Sequence
from typing import ClassVar

from hicache.tools.traces.chaining import Chain
from hicache.tools.traces.converting import Format, Options, has, hashed_blocks
from hicache.tools.traces.errors import BadRecord
from hicache.tools.traces.fields import Fields, items, mapping, name_of, number, whole
from hicache.tools.traces.normal import TraceInfo, TraceRequest

MOONCAKE_BLOCK = 512
QWEN_BLOCK = 16
LIKELY_BLOCKS = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1024, 2048, 4096, 1)
ROOT_CHAT = "-1"


class Mooncake(Format):
    """Mooncake's open traces; each request is a session, for they do not tell."""

    name: ClassVar[str] = "mooncake"
    ms_per_unit: float = 1.0

    def __init__(self, head: Sequence[object], options: Options) -> None:
        super().__init__(head, options)
        self.block_size = options.block_size or MOONCAKE_BLOCK
        self._chain = Chain(self.counted.ids)

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        is_timed = has(head[0], "timestamp", "input_length", "hash_ids")
        return is_timed and likely_block_size(head) in (MOONCAKE_BLOCK, None)

    def info(self) -> TraceInfo:
        return TraceInfo(self.name, self.block_size, has_times=True, has_blocks=True)

    def convert(self, record: object) -> list[TraceRequest]:
        fields = mapping(record)
        session = name_of(fields, "session_id") or str(self.counted.next_index)
        return [self.request(fields, session=session, parent=None)]

    def request(self, fields: Fields, *, session: str, parent: int | None) -> TraceRequest:
        """Return the request of one line."""
        num_tokens = whole(fields, "input_length", least=1)
        num_output_tokens = whole(fields, "output_length", default=0)
        time_s = self.time_s(fields)
        hashes = items(fields, "hash_ids")
        ids = self.counted.ids
        blocks = hashed_blocks(self._chain, ids, hashes, num_tokens, self.block_size)
        return TraceRequest(time_s, session, "", num_tokens, num_output_tokens, blocks, parent)

    def time_s(self, fields: Fields) -> float | None:
        """Return when the request arrives."""
        return number(fields, "timestamp") * self.ms_per_unit / 1000


class QwenBailian(Mooncake):
    """Qwen's traces of Bailian: a session is a chat with all that continue it."""

    name = "qwen-bailian"
    ms_per_unit = 1000.0

    def __init__(self, head: Sequence[object], options: Options) -> None:
        super().__init__(head, options)
        self.block_size = options.block_size or QWEN_BLOCK
        self._indices: dict[str, int] = {}
        self._sessions: dict[str, str] = {}

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        return has(head[0], "chat_id", "parent_chat_id", "hash_ids")

    def convert(self, record: object) -> list[TraceRequest]:
        fields = mapping(record)
        chat, before = name_of(fields, "chat_id"), name_of(fields, "parent_chat_id")
        if chat is None:
            raise BadRecord("chat_id: expected a name, found nothing")
        if before is None or before == ROOT_CHAT:
            session, parent = chat, None
        else:
            # One that began before the trace did is a session like the others.
            session, parent = self._sessions.get(before, before), self._indices.get(before)
        request = self.request(fields, session=session, parent=parent)
        self._sessions[chat], self._indices[chat] = session, self.counted.next_index
        return [request]


class VllmTimed(Mooncake):
    """What ``vllm bench`` replays as ``timed_trace``: the block size is found from the lengths."""

    name = "vllm-timed"

    def __init__(self, head: Sequence[object], options: Options) -> None:
        super().__init__(head, options)
        self.block_size = options.block_size or likely_block_size(head) or MOONCAKE_BLOCK
        times = [record.get("timestamp") for record in head if isinstance(record, dict)]
        is_in_seconds = any(isinstance(time, float) and not time.is_integer() for time in times)
        self.ms_per_unit = 1000.0 if is_in_seconds else 1.0

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        return has(head[0], "timestamp", "input_length", "hash_ids")

    def info(self) -> TraceInfo:
        unit = "seconds" if self.ms_per_unit > 1 else "milliseconds"
        note = f"blocks of {self.block_size} tokens and times in {unit}, as its figures suggest"
        return TraceInfo(self.name, self.block_size, has_times=True, has_blocks=True, note=note)


class KvcacheSimulator(Mooncake):
    """What kvcache-simulator reads: in the order of the file, without times.

    A block size in any line is that of all lines, whatever a person says; without one, a person
    must. ``block_tokens`` says how many tokens each block holds; a page is full or the last one,
    so a line with a short block before its end is refused.
    """

    name = "kvcache-simulator"

    def __init__(self, head: Sequence[object], options: Options) -> None:
        super().__init__(head, options)
        sizes = [mapping(each)["block_size"] for each in head if has(each, "block_size")]
        declared = whole({"block_size": sizes[0]}, "block_size", least=1) if sizes else None
        if declared is None and options.block_size is None:
            raise BadRecord("block_size: no line says it; say it with --block-size")
        self.block_size = declared or options.block_size or MOONCAKE_BLOCK

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        return any(has(record, "block_size", "hash_ids", "input_length") for record in head)

    def info(self) -> TraceInfo:
        return TraceInfo(self.name, self.block_size, has_times=False, has_blocks=True)

    def convert(self, record: object) -> list[TraceRequest]:
        fields = mapping(record)
        found = whole(fields, "block_size", least=1, default=self.block_size)
        if found != self.block_size:
            raise BadRecord(f"block_size: {found}, but the trace began with {self.block_size}")
        if fields.get("block_tokens") is not None:
            self._check_block_tokens(fields)
        return super().convert(record)

    def time_s(self, fields: Fields) -> float | None:
        return None

    def _check_block_tokens(self, fields: Fields) -> None:
        sizes = [
            whole({"block_tokens": size}, "block_tokens", least=1)
            for size in items(fields, "block_tokens")
        ]
        num_tokens, num_ids = whole(fields, "input_length", least=1), len(items(fields, "hash_ids"))
        if len(sizes) != num_ids:
            raise BadRecord(f"block_tokens: {len(sizes)} of them for {num_ids} hash_ids")
        if sum(sizes) != num_tokens:
            raise BadRecord(f"block_tokens: they add up to {sum(sizes)}, not to {num_tokens}")
        if any(size != self.block_size for size in sizes[:-1]):
            raise BadRecord(f"block_tokens: only the last may be less than {self.block_size}")


def likely_block_size(records: Sequence[object]) -> int | None:
    """Return a block size that fits the lengths and counts of these records, if one does.

    The last block may or may not have an id. Records that fit nothing are bad lines: they have
    no say as long as half of the others agree.
    """
    lengths = [found for record in records if (found := _lengths(record))]
    best, most = None, 0
    for size in LIKELY_BLOCKS:
        fit = sum(count in (tokens // size, -(-tokens // size)) for tokens, count in lengths)
        if fit > most:
            best, most = size, fit
    return best if 2 * most > len(lengths) else None


def _lengths(record: object) -> tuple[int, int] | None:
    if not isinstance(record, dict):
        return None
    num_tokens, hashes = record.get("input_length"), record.get("hash_ids")
    if isinstance(num_tokens, int) and isinstance(hashes, list) and hashes:
        return num_tokens, len(hashes)
    return None
