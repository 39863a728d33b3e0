"""Agent sessions as WEKA and SemiAnalysis record them: one JSON object a session.

Times and block ids are local to the session; a sub-agent is a record among the requests, with
requests of its own, times from its own start and the ids of its session. The ids name full blocks
only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hicache.tools.traces.chaining import Chain
from hicache.tools.traces.converting import Format, Options, has, hashed_blocks
from hicache.tools.traces.errors import BadRecord
from hicache.tools.traces.fields import Fields, items, mapping, name_of, number, text, whole
from hicache.tools.traces.normal import TraceInfo, TraceRequest

DEFAULT_BLOCK = 64
MAX_DEPTH = 20


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a session, and which agent makes it."""

    time_s: float
    agent: int
    fields: Fields


class AgentSessions(Format):
    """One session a record: its requests in the order of their times."""

    name: ClassVar[str] = "agent-sessions"
    has_whole_sessions = True

    def __init__(self, head: Sequence[object], options: Options) -> None:
        super().__init__(head, options)
        sizes = [whole(mapping(record), "block_size", default=0) for record in head[:1]]
        self.block_size = options.block_size or (sizes or [0])[0] or DEFAULT_BLOCK
        self._whole_trace = Chain(self.counted.ids)

    @staticmethod
    def recognises(head: Sequence[object]) -> bool:
        return has(head[0], "block_size", "requests")

    def info(self) -> TraceInfo:
        note = "times and block ids are local to a session: sessions share nothing"
        return TraceInfo(self.name, self.block_size, has_times=False, has_blocks=True, note=note)

    def convert(self, record: object) -> list[TraceRequest]:
        fields = mapping(record)
        found = whole(fields, "block_size", default=self.block_size)
        if found != self.block_size:
            raise BadRecord(f"block_size: {found}, but the trace began with {self.block_size}")
        is_local = text(fields, "hash_id_scope", "local") == "local"
        chain = Chain(self.counted.ids) if is_local else self._whole_trace
        session = name_of(fields, "id") or f"session {self.counted.next_index}"
        agents = iter(range(1, 1 << 30))
        calls = list(_calls(items(fields, "requests"), 0.0, 0, agents))
        calls.sort(key=lambda call: call.time_s)
        latest: dict[int, int] = {}
        requests = []
        for index, call in enumerate(calls, start=self.counted.next_index):
            parent = latest.get(call.agent)
            requests.append(self._request(call, session, chain, parent))
            latest[call.agent] = index
        return requests

    def _request(self, call: Call, session: str, chain: Chain, parent: int | None) -> TraceRequest:
        num_tokens = whole(call.fields, "in", least=1)
        num_output_tokens = whole(call.fields, "out", default=0)
        hashes, ids = items(call.fields, "hash_ids"), self.counted.ids
        blocks = hashed_blocks(chain, ids, hashes, num_tokens, self.block_size)
        return TraceRequest(call.time_s, session, "", num_tokens, num_output_tokens, blocks, parent)


def _calls(
    records: list[object], start_s: float, agent: int, agents: Iterator[int], depth: int = 0
) -> Iterator[Call]:
    if depth > MAX_DEPTH:
        raise BadRecord(f"requests: agents are nested more than {MAX_DEPTH} deep")
    for record in records:
        fields = mapping(record)
        time_s = start_s + number(fields, "t")
        if "requests" in fields:
            yield from _calls(items(fields, "requests"), time_s, next(agents), agents, depth + 1)
        else:
            yield Call(time_s, agent, fields)
