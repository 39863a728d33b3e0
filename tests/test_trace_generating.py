"""Generated loads: what they are made of, equal bytes from equal seeds, and their optimum."""

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import InputError
from hicache.tools.traces.generating import Blocks, Load, generate, write
from hicache.tools.traces.normal import TraceRequest
from hicache.tools.traces.opening import open_trace
from hicache.tools.traces.shapes import KINDS, Agents, Chat, Rag, Shape, SystemPrompts, Tree
from hicache.tools.traces.showing import shape_of
from hicache.tools.traces.summary import summarise
from hicache.tools.traces.workloads import Piece, turns

SMALL: dict[str, Shape] = {
    "chat": Chat(turns=3),
    "system-prompts": SystemPrompts(prompts=3, system_tokens=300),
    "rag": Rag(documents=5, documents_a_question=2, document_tokens=100),
    "agents": Agents(tasks=2, calls=2, system_tokens=500, result_tokens=50),
    "tree": Tree(depth=2, branches=3, kept=2),
}
kinds = pytest.mark.parametrize("kind", SMALL)


def edges(requests: list[TraceRequest], block_size: int) -> int:
    """Return the tokens of all different prefixes, counted one by one."""
    tokens: dict[tuple[int, ...], int] = {}
    for request in requests:
        ids = request.blocks.tolist()
        for end in range(1, len(ids) + 1):
            is_last = end == len(ids)
            rest = request.num_input_tokens - (len(ids) - 1) * block_size
            tokens[tuple(ids[:end])] = rest if is_last else block_size
    return sum(tokens.values())


def test_every_kind_is_tried() -> None:
    assert SMALL.keys() == KINDS.keys()


@kinds
def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path, kind: str) -> None:
    def written(seed: int, name: str) -> bytes:
        load = Load(SMALL[kind], sessions=5, seed=seed)
        write(tmp_path / name, load.info, generate(load))
        return (tmp_path / name).read_bytes()

    assert written(1, "a.gz") == written(1, "b.gz")
    assert written(1, "a") == written(1, "b")
    assert written(1, "a") != written(2, "b")


@kinds
def test_a_written_trace_is_read_back_equal(tmp_path: Path, kind: str) -> None:
    load = Load(SMALL[kind], sessions=6, block_size=16)
    write(tmp_path / "trace.gz", load.info, generate(load))

    trace = open_trace(tmp_path / "trace.gz")

    assert list(trace) == list(generate(load))
    assert trace.info == load.info


@kinds
@pytest.mark.parametrize("block_size", [16, 64])
def test_the_optimum_is_that_of_counting_every_prefix(kind: str, block_size: int) -> None:
    load = Load(SMALL[kind], sessions=12, block_size=block_size)
    requests = list(generate(load))

    summary = summarise(load.info, requests)

    num_tokens = sum(request.num_input_tokens for request in requests)
    assert summary.num_new_tokens == edges(requests, block_size)
    assert summary.token_optimum == 1 - edges(requests, block_size) / num_tokens
    assert 0 < summary.token_optimum < 1


@kinds
def test_requests_come_in_the_order_of_their_times_and_after_those_they_continue(
    kind: str,
) -> None:
    requests = list(generate(Load(SMALL[kind], sessions=20, rate=0.1)))

    times = [request.time_s for request in requests if request.time_s is not None]
    assert times == sorted(times)
    assert len(times) == len(requests)
    for index, request in enumerate(requests):
        assert len(request.blocks) == -(-request.num_input_tokens // 64)
        if request.parent is None:
            continue
        parent = requests[request.parent]
        full = parent.num_input_tokens // 64
        assert request.parent < index
        assert request.session == parent.session
        assert request.blocks[:full] == parent.blocks[:full]
        assert request.num_input_tokens > parent.num_input_tokens


def test_all_chats_share_their_system_prompt() -> None:
    requests = list(generate(Load(Chat(system_tokens=640), sessions=4)))

    assert len({request.blocks[0] for request in requests}) == 1
    assert len({request.session for request in requests}) == 4


def test_a_chat_without_a_system_prompt_shares_nothing_with_others() -> None:
    by_session: dict[str, set[int]] = defaultdict(set)
    for request in generate(Load(Chat(system_tokens=0), sessions=4)):
        by_session[request.session].update(request.blocks)

    assert sum(map(len, by_session.values())) == len(set().union(*by_session.values()))


def test_a_session_does_not_depend_on_how_many_there_are() -> None:
    assert turns(SMALL["rag"], 7, 3) == turns(SMALL["rag"], 7, 3)

    few = {r.session: r for r in generate(Load(SMALL["rag"], sessions=3))}
    many = {r.session: r for r in generate(Load(SMALL["rag"], sessions=9))}

    assert {name: many[name].num_input_tokens for name in few} == {
        name: request.num_input_tokens for name, request in few.items()
    }


def test_the_first_of_many_system_prompts_is_asked_most() -> None:
    counts: dict[int, int] = defaultdict(int)
    for request in generate(Load(SystemPrompts(prompts=5, skew=2.0), sessions=400)):
        counts[request.blocks[0]] += 1

    assert max(counts.values()) > 200
    assert len(counts) == 5


def test_each_kept_thought_is_continued_as_often_as_there_are_branches() -> None:
    shape = Tree(depth=3, branches=4, kept=2)

    parents = [turn.parent for turn in turns(shape, 0, 0)]

    assert len(parents) == 4 + 8 + 8
    assert parents.count(None) == 4
    assert all(parents.count(parent) == 4 for parent in set(parents))


def test_sessions_can_start_at_even_times() -> None:
    load = Load(SMALL["system-prompts"], sessions=4, rate=2.0, arrivals="even")

    assert [request.time_s for request in generate(load)] == [0.0, 0.5, 1.0, 1.5]


def test_sessions_start_at_the_rate_that_is_asked_for() -> None:
    load = Load(SMALL["system-prompts"], sessions=2000, rate=4.0)

    *_, last = generate(load)

    assert last.time_s == pytest.approx(500, rel=0.1)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=6), max_size=6))
def test_blocks_are_equal_where_all_tokens_up_to_their_end_are(
    inputs: list[list[tuple[int, int]]],
) -> None:
    blocks = Blocks(4)
    known: dict[tuple[tuple[int, int], ...], int] = {}

    for pieces in inputs:
        tokens = [(name, at) for name, size in pieces for at in range(size)]
        found = blocks.of([Piece((name,), size) for name, size in pieces])
        assert len(found) == -(-len(tokens) // 4)
        for index, block in enumerate(found):
            prefix = tuple(tokens[: (index + 1) * 4])
            assert known.setdefault(prefix, block) == block

    assert len(set(known.values())) == len(known)


@pytest.mark.parametrize(
    ("kind", "numbers", "what"),
    [
        ("chats", {}, "'chats' is no kind of load: chat, system-prompts, rag, agents, tree"),
        ("tree", {"turns": "2"}, "tree: turns: no such number, there are output_tokens"),
        ("chat", {"turns": "0"}, "chat: turns: Input should be greater than 0"),
    ],
)
def test_a_wrong_number_is_told_with_its_name(
    kind: str, numbers: dict[str, str], what: str
) -> None:
    with pytest.raises(InputError) as refused:
        shape_of(kind, numbers)

    assert str(refused.value).startswith(what)


def test_a_file_that_cannot_be_written_is_told_with_its_name(tmp_path: Path) -> None:
    load = Load(SMALL["chat"], sessions=1)

    with pytest.raises(InputError, match=r"/absent/trace: No such file or directory$"):
        write(tmp_path / "absent" / "trace", load.info, generate(load))
