"""Every format of a trace, by a few lines of it: what is known of the whole, and its requests."""

import json
from pathlib import Path

import pytest

from hicache.errors import InputError
from hicache.tools.traces.normal import TraceInfo, TraceRequest
from hicache.tools.traces.normal_form import written
from hicache.tools.traces.opening import open_trace
from tests.trace_files import blocks, lines, opened, shared_blocks


def facts(info: TraceInfo) -> tuple[str, int, bool, bool]:
    return info.format, info.block_size, info.has_times, info.has_blocks


def hashed(time: float, num_tokens: int, *hashes: int | str, **fields: object) -> dict[str, object]:
    return {
        "timestamp": time,
        "input_length": num_tokens,
        "output_length": 7,
        "hash_ids": list(hashes),
        **fields,
    }


def test_mooncake_counts_milliseconds_and_blocks_of_512(tmp_path: Path) -> None:
    trace = opened(
        tmp_path, lines(hashed(0, 1100, 0, 1, 2), hashed(2500, 1536, 0, 1, 9), hashed(2500, 1, 5))
    )

    first, second, third = trace

    assert facts(trace.info) == ("mooncake", 512, True, True)
    assert blocks([first, second, third]) == [[0, 1, 2], [0, 1, 3], [4]]
    assert (first.time_s, second.time_s, third.time_s) == (0.0, 2.5, 2.5)
    assert (second.num_input_tokens, second.num_output_tokens) == (1536, 7)
    assert (first.session, second.session, second.parent) == ("0", "1", None)


def test_qwen_bailian_chats_continue_each_other(tmp_path: Path) -> None:
    def chat(number: int, parent: int, turn: int) -> dict[str, object]:
        return {"chat_id": number, "parent_chat_id": parent, "turn": turn, "type": "text"}

    trace = opened(
        tmp_path,
        lines(
            hashed(0.5, 30, 4, 5, **chat(159, -1, 1)),
            hashed(1.0, 20, 4, 6, **chat(7, -1, 1)),
            hashed(61.114, 48, 4, 5, 6, **chat(160, 159, 2)),
            hashed(70.0, 16, 4, **chat(161, 99, 2)),
            hashed(90.0, 17, 4, 5, **chat(162, 160, 3)),
        ),
    )

    requests = list(trace)

    assert facts(trace.info) == ("qwen-bailian", 16, True, True)
    assert [request.session for request in requests] == ["159", "7", "159", "99", "159"]
    assert [request.parent for request in requests] == [None, None, 0, None, 2]
    assert [request.time_s for request in requests] == [0.5, 1.0, 61.114, 70.0, 90.0]
    # Its hashes are of a block alone: 6 after 4 and 6 after 5 are not the same block.
    assert blocks(requests) == [[0, 1], [0, 2], [0, 1, 3], [0], [0, 1]]


def agent_session(name: str, **fields: object) -> dict[str, object]:
    return {
        "id": name,
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [
            {"t": 0.0, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 2]},
            {
                "t": 5.0,
                "requests": [
                    {"t": 0.0, "type": "n", "in": 64, "out": 1, "hash_ids": [3]},
                    {"t": 9.0, "type": "n", "in": 128, "out": 1, "hash_ids": [3, 4]},
                ],
            },
            {"t": 7.5, "type": "s", "in": 192, "out": 3, "hash_ids": [1, 2, 5]},
        ],
        **fields,
    }


def test_agent_sessions_have_ids_and_times_of_their_own(tmp_path: Path) -> None:
    trace = opened(tmp_path, lines(agent_session("a"), agent_session("b")))

    requests = list(trace)

    assert facts(trace.info) == ("agent-sessions", 64, False, True)
    assert [request.session for request in requests] == ["a"] * 4 + ["b"] * 4
    assert [request.time_s for request in requests[:4]] == [0.0, 5.0, 7.5, 14.0]
    assert shared_blocks(requests) == [0, 0, 2, 1] * 2
    assert [len(request.blocks) for request in requests[:4]] == [3, 1, 3, 2]
    assert not set(requests[0].blocks) & set(requests[4].blocks)


def test_a_request_of_a_sub_agent_continues_that_agent(tmp_path: Path) -> None:
    trace = opened(tmp_path, lines(agent_session("a"), agent_session("b")))

    parents = [request.parent for request in trace]

    assert parents == [None, None, 0, 1, None, None, 4, 5]


def test_agent_sessions_may_have_ids_in_common(tmp_path: Path) -> None:
    sessions = [agent_session(name, hash_id_scope="global") for name in "ab"]

    assert shared_blocks(list(opened(tmp_path, lines(*sessions)))) == [0, 0, 2, 1, 2, 1, 3, 2]


def test_rounds_share_what_the_provider_had_of_the_round_before(tmp_path: Path) -> None:
    def round_of(session: str, prefix: int, new: int, second: int) -> dict[str, object]:
        sent = f"2026-06-01T05:40:{second:02}.500Z"
        return {
            "session_id": session,
            "prefix_tokens": prefix,
            "newly_append_tokens": new,
            "output_tokens": 11,
            "timing_events": [
                {"event_type": "user_message", "timestamp": sent},
                {"event_type": "text", "timestamp": "2026-06-01T06:00:00Z"},
            ],
        }

    trace = opened(
        tmp_path,
        lines(
            round_of("a", 100, 100, 10),
            round_of("a", 195, 60, 25),
            round_of("b", 195, 1, 30),
            round_of("a", 64, 10, 40),
        ),
    )

    requests = list(trace)

    assert facts(trace.info) == ("tracelab", 64, False, True)
    assert [request.num_input_tokens for request in requests] == [200, 255, 196, 74]
    assert [len(request.blocks) for request in requests] == [4, 4, 4, 2]
    assert shared_blocks(requests) == [0, 3, 0, 1]
    assert [request.parent for request in requests] == [None, 0, None, 1]
    assert [request.time_s for request in requests] == [0.0, 15.0, 0.0, 30.0]


def test_a_round_shares_no_more_than_the_round_before_had(tmp_path: Path) -> None:
    rounds = [
        {"session_id": "a", "prefix_tokens": 0, "newly_append_tokens": 70},
        {"session_id": "a", "prefix_tokens": 640, "newly_append_tokens": 0},
    ]

    requests = list(opened(tmp_path, lines(*rounds)))

    assert shared_blocks(requests) == [0, 1]
    assert requests[0].time_s is None


def test_azure_tables_share_nothing_and_say_so(tmp_path: Path) -> None:
    table = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,64,0\r\n"
        "2023-11-16 18:15:50.9951690+00:00,1,109"
    )
    trace = opened(tmp_path, table)

    requests = list(trace)

    assert facts(trace.info) == ("azure", 64, True, False)
    assert "nothing can be shared" in trace.info.note
    assert [request.num_input_tokens for request in requests] == [374, 64, 1]
    assert [request.num_output_tokens for request in requests] == [44, 0, 109]
    assert [request.time_s for request in requests] == pytest.approx([0, 4.314579, 4.314579])
    assert blocks(requests) == [[0, 1, 2, 3, 4, 5], [6], [7]]


@pytest.mark.parametrize(
    ("times", "found"), [([0.25, 3.0], [0.25, 3.0]), ([250, 3000], [0.25, 3.0])]
)
def test_a_timed_trace_has_the_block_size_and_the_unit_that_its_figures_suggest(
    tmp_path: Path, times: list[float], found: list[float]
) -> None:
    trace = opened(
        tmp_path, lines(hashed(times[0], 70, *range(5)), hashed(times[1], 64, 0, 1, 2, 9))
    )

    requests = list(trace)

    assert facts(trace.info) == ("vllm-timed", 16, True, True)
    assert [request.time_s for request in requests] == found
    assert shared_blocks(requests) == [0, 3]


def test_kvcache_simulator_lines_carry_their_block_size(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        lines(
            {"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128},
            {"block_size": 64, "hash_ids": [2001, 2003], "input_length": 128, "timestamp": 5},
        ),
    )

    requests = list(trace)

    assert facts(trace.info) == ("kvcache-simulator", 64, False, True)
    assert shared_blocks(requests) == [0, 1]
    assert [request.time_s for request in requests] == [None, None]


def test_a_block_size_in_any_line_of_kvcache_simulator_is_that_of_all(tmp_path: Path) -> None:
    content = lines(
        {"hash_ids": ["a", "b"], "input_length": 32},
        {"block_size": 16, "hash_ids": ["a", "b", "c"], "input_length": 33},
    )

    trace = opened(tmp_path, content, block_size=64)

    assert facts(trace.info) == ("kvcache-simulator", 16, False, True)
    assert shared_blocks(list(trace)) == [0, 2]


def test_kvcache_simulator_without_a_block_size_takes_that_of_a_person(tmp_path: Path) -> None:
    content = lines({"hash_ids": ["a", "b"], "input_length": 100})

    trace = opened(tmp_path, content, format="kvcache-simulator", block_size=64)

    assert trace.info.block_size == 64
    with pytest.raises(InputError, match="no line says it; say it with --block-size"):
        opened(tmp_path, content, format="kvcache-simulator")


@pytest.mark.parametrize(
    ("block_tokens", "what"),
    [
        ([64, 64, 2], None),
        ([64, 66], "2 of them for 3 hash_ids"),
        ([64, 64, 64], "they add up to 192, not to 130"),
        ([64, 32, 34], "only the last may be less than 64"),
        ([64, 65, 1], "only the last may be less than 64"),
        ([64, 66, 0], "0 is out of range"),
        (64, "expected a list, found 64"),
    ],
)
def test_block_tokens_of_kvcache_simulator_are_those_of_whole_pages(
    tmp_path: Path, block_tokens: object, what: str | None
) -> None:
    record = {"block_size": 64, "hash_ids": ["a", "b", "c"], "input_length": 130}

    trace = opened(tmp_path, lines(record, {**record, "block_tokens": block_tokens}))

    assert sum(1 for _ in trace) == (1 if what else 2)
    assert [line.partition("block_tokens: ")[2] for line in trace.info.bad_lines] == (
        [what] if what else []
    )


CHAT = [
    {"role": "system", "content": "You are brief. " * 40},
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sky"}}]},
    {"role": "tool", "content": "clear"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
]


@pytest.mark.parametrize("record", [{"id": 5, "messages": CHAT}, CHAT])
def test_each_turn_of_a_message_list_is_a_request_with_all_before_it(
    tmp_path: Path, record: object
) -> None:
    trace = opened(tmp_path, lines(record, record))

    requests = list(trace)

    assert facts(trace.info) == ("openai-messages", 64, False, True)
    assert [request.parent for request in requests] == [None, 0, 1, None, 3, 4]
    sizes = [request.num_input_tokens for request in requests[:3]]
    assert sizes == sorted(sizes)
    assert [request.num_output_tokens > 0 for request in requests[:3]] == [True, True, False]
    # The second list is the first one again, to the last block.
    assert blocks(requests[3:]) == blocks(requests[:3])
    assert len({request.session for request in requests}) == (1 if isinstance(record, dict) else 2)


def test_text_is_tokenised_where_a_tokenizer_is_given(tmp_path: Path) -> None:
    def words(text: str) -> list[int]:
        return [len(word) for word in text.split()]

    trace = opened(tmp_path, lines({"messages": CHAT}), tokenizer=words, block_size=2)

    first = next(iter(trace))

    # "system:", 120 words, "user:", 3 words
    assert first.num_input_tokens == 1 + 120 + 1 + 3
    assert len(first.blocks) == 63
    assert trace.info.note == "text, tokenised"


@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt_is_one_array_of_conversations(tmp_path: Path, indent: int | None) -> None:
    conversation = {
        "id": "x_0",
        "conversations": [
            {"from": "human", "value": "hi " * 100},
            {"from": "gpt", "value": "hello"},
            {"from": "human", "value": "bye"},
            {"from": "gpt", "value": "bye"},
        ],
    }
    empty = {"id": "y", "conversations": []}
    content = json.dumps([conversation, empty, conversation], indent=indent)

    trace = opened(tmp_path, content)
    requests = list(trace)

    assert facts(trace.info) == ("sharegpt", 64, False, True)
    assert [request.parent for request in requests] == [None, 0, None, 2]
    assert blocks(requests[2:]) == blocks(requests[:2])
    assert trace.info.num_bad_lines == 0


def test_questions_without_answers_hold_only_the_questions_before(tmp_path: Path) -> None:
    trace = opened(
        tmp_path, lines({"question_id": 81, "category": "w", "turns": ["a" * 300, "b" * 300]})
    )

    first, second = trace

    assert facts(trace.info) == ("mt-bench", 64, False, True)
    assert (first.session, second.parent, second.num_output_tokens) == ("81", 0, 0)
    assert shared_blocks([first, second]) == [0, 1]


def test_the_normal_form_is_read_back_equal(tmp_path: Path) -> None:
    trace = opened(tmp_path, lines(agent_session("a"), agent_session("b")))
    requests = [
        TraceRequest(r.time_s, r.session, "t", r.num_input_tokens, 0, r.blocks, r.parent)
        for r in trace
    ]
    path = tmp_path / "normal"
    path.write_bytes(b"".join(written(trace.info, requests)))

    read = open_trace(path)

    assert list(read) == requests
    assert read.info == trace.info
