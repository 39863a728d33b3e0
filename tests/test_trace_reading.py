"""Reading trace files: how they are packed, what is malformed, and what cannot be read at all."""

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.errors import InputError
from hicache.tools.traces.opening import open_trace
from tests.trace_files import blocks, lines, opened

GOOD = {"timestamp": 0, "input_length": 513, "output_length": 7, "hash_ids": [0, 1]}
AGAIN = {"timestamp": 9, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 2]}
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "xz": lzma.compress,
}


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """What the process reads, empty at first."""
    content = io.BytesIO()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content))
    return content


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_trace_is_found_by_its_content_however_it_is_packed(tmp_path: Path, packing: str) -> None:
    content = lines(*[GOOD] * 3000).encode()

    trace = opened(tmp_path, PACKINGS[packing](content))

    assert trace.info.format == "mooncake"
    assert sum(1 for _ in trace) == 3000


@pytest.mark.parametrize("packing", PACKINGS)
def test_stdin_is_read_once_and_left_open(stdin: io.BytesIO, packing: str) -> None:
    stdin.write(PACKINGS[packing](lines(GOOD, AGAIN).encode()))
    stdin.seek(0)
    trace = open_trace("-")

    assert blocks(trace) == [[0, 1], [0, 1, 2]]

    with pytest.raises(InputError, match=r"^stdin: it can be read only once$"):
        list(trace)
    assert not stdin.closed


def test_a_trace_can_be_read_again_and_gives_the_same(tmp_path: Path) -> None:
    trace = opened(tmp_path, "nonsense\n" + lines(GOOD, AGAIN), format="mooncake", max_bad_lines=1)

    half = iter(trace)
    next(half)

    assert list(trace) == list(trace)
    assert trace.info.num_bad_lines == 1


def test_a_malformed_line_is_reported_with_its_number_and_left_out(tmp_path: Path) -> None:
    bad = [
        '{"timestamp": 0, "input_len',
        json.dumps({**GOOD, "input_length": -1}),
        json.dumps({**GOOD, "input_length": "513"}),
        json.dumps({**GOOD, "timestamp": None}),
        json.dumps({**GOOD, "hash_ids": [0, 1, 2, 3]}),
        json.dumps({**GOOD, "hash_ids": [0, 1.5]}),
        json.dumps({**GOOD, "hash_ids": 5}),
        json.dumps({**GOOD, "output_length": True}),
        "[1, 2]",
    ]
    content = lines(GOOD) + "\n" + "\n".join(bad) + "\n" + lines(AGAIN)

    trace = opened(tmp_path, content)
    requests = list(trace)

    path = tmp_path / "trace"
    assert [request.session for request in requests] == ["0", "1"]
    assert trace.info.num_bad_lines == len(bad)
    assert trace.info.bad_lines[0].startswith(f"{path}:3: is not JSON: ")
    assert trace.info.bad_lines[1:] == [
        f"{path}:4: input_length: -1 is out of range",
        f"{path}:5: input_length: expected a whole number, found '513'",
        f"{path}:6: timestamp: expected a number, found nothing",
        f"{path}:7: hash_ids: 513 tokens are 2 blocks of 512, found 4",
        f"{path}:8: hash_ids: 1.5 is no block id",
        f"{path}:9: hash_ids: expected a list, found 5",
        f"{path}:10: output_length: expected a whole number, found True",
        f"{path}:11: expected an object, found a list",
    ]


def test_a_malformed_line_takes_no_block_from_the_others(tmp_path: Path) -> None:
    clean = list(opened(tmp_path, lines(GOOD, AGAIN)))
    spoiled = list(opened(tmp_path, lines(GOOD, {**AGAIN, "hash_ids": [7, 8, None]}, AGAIN)))

    assert blocks(spoiled) == blocks(clean)


def test_too_many_malformed_lines_end_the_reading(tmp_path: Path) -> None:
    trace = opened(tmp_path, lines(GOOD) + "x\n" * 3 + lines(GOOD), max_bad_lines=2)
    requests = iter(trace)
    next(requests)

    with pytest.raises(InputError, match=r"trace:4: is not JSON.*more than 2 lines are malformed"):
        list(requests)


def test_malformed_lines_may_come_first(tmp_path: Path) -> None:
    trace = opened(tmp_path, "{nonsense\n" + lines(GOOD))

    assert trace.info.format == "mooncake"
    assert sum(1 for _ in trace) == 1
    assert trace.info.num_bad_lines == 1


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", r"it is empty"),
        (b" \n\n", r"it is empty"),
        (b"{nonsense\n", r"1: is not JSON: .*"),
        (b"time;tokens\n1;2\n", r"it looks like none of hicache, .*, azure"),
        (b'{"a": 1}\n', r"it looks like none of hicache, .*"),
        (b"[]", r"it is empty"),
        (b'[{"id": "x", ', r"1: is not JSON from here on: .*"),
        (b'[\n{"conversations": []},\n', r"3: the file ends within an array"),
        (b'{"hicache_trace": 2}\n', r"1: hicache_trace: this program reads version 1"),
        (gzip.compress(lines(GOOD).encode(), mtime=0)[:-9], r"Compressed file ended .*"),
        (b"\xfd7zXZ\x00nonsense", r".*"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, content: bytes, what: str) -> None:
    with pytest.raises(InputError, match=rf"^.*/trace:\s?{what}$"):
        list(opened(tmp_path, content))


def test_a_file_that_is_absent_is_told_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"/absent: No such file or directory$"):
        open_trace(tmp_path / "absent")


def test_an_unknown_format_is_told_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^'mooncak' is no format of a trace: hicache, kvcache"):
        opened(tmp_path, lines(GOOD), format="mooncak")


def test_an_object_over_several_lines_is_a_session_too(tmp_path: Path) -> None:
    session = {"id": "a", "block_size": 64, "requests": [{"t": 0, "in": 64, "hash_ids": [1]}]}

    trace = opened(tmp_path, json.dumps(session, indent=1) + "\n" + json.dumps(session, indent=1))

    assert blocks(trace) == [[0], [1]]


def test_only_the_first_sessions_are_read_where_so_many_are_asked_for(tmp_path: Path) -> None:
    def chat(number: int, parent: int) -> dict[str, object]:
        return {"chat_id": number, "parent_chat_id": parent, **GOOD, "hash_ids": list(range(33))}

    content = lines(chat(1, -1), chat(2, -1), chat(3, -1), chat(4, 3), chat(5, 1), chat(6, 5))

    requests = list(opened(tmp_path, content, sessions=2))

    assert [request.session for request in requests] == ["1", "2", "1", "1"]
    assert [request.parent for request in requests] == [None, None, 0, 2]


def test_a_long_array_is_read_across_the_ends_of_its_buffers(tmp_path: Path) -> None:
    conversations = [
        {"id": str(n), "conversations": [{"from": "human", "value": "ü" * (n * 37 % 5000)}]}
        for n in range(200)
    ]

    trace = opened(tmp_path, json.dumps(conversations, indent=1, ensure_ascii=False))

    sizes = [request.num_input_tokens for request in trace]
    assert sizes == [-(-(len("user:\n\n") + 2 * (n * 37 % 5000)) // 4) for n in range(200)]
