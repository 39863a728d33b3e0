"""``hicache trace``: what it prints, writes and returns."""

import io
import json
from pathlib import Path

import pytest

from hicache.tools import cli
from hicache.tools.traces.opening import open_trace
from tests.trace_files import blocks, lines

RECORD = {"timestamp": 1500, "input_length": 513, "output_length": 7, "hash_ids": [0, 1]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines(RECORD, RECORD))
    return path


def test_show_says_what_a_trace_is_and_holds(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    assert cli.main(["trace", "show", str(trace)]) == 0

    printed = capsys.readouterr()
    assert "mooncake" in printed.out
    assert "an infinite cache hits 50.00% of tokens, 50.00% of blocks" in printed.out
    assert printed.err == ""


def test_show_writes_the_counts_to_a_file(tmp_path: Path, trace: Path) -> None:
    found = tmp_path / "found.json"

    assert cli.main(["trace", "show", str(trace), "--json", str(found)]) == 0

    assert json.loads(found.read_text()) == {
        "trace": {
            "file": str(trace),
            "format": "mooncake",
            "block_size": 512,
            "has_times": True,
            "has_blocks": True,
            "note": "",
            "bad_lines": 0,
            "requests": 2,
            "continuing_requests": 0,
            "sessions": 2,
            "tenants": 1,
            "input_tokens": 1026,
            "output_tokens": 14,
            "longest_input_tokens": 513,
            "block_references": 4,
            "unique_blocks": 2,
            "unique_tokens": 513,
            "optimum": {"blocks": 0.5, "tokens": 0.5},
            "first_s": 1.5,
            "last_s": 1.5,
            "is_in_order": True,
        }
    }


def test_show_reports_malformed_lines_and_returns_that_it_found_problems(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    trace.write_text(lines(RECORD) + "nonsense\n")

    assert cli.main(["trace", "show", str(trace)]) == 1

    printed = capsys.readouterr()
    assert "1 lines, left out" in printed.out
    assert printed.err.startswith(f"hicache: {trace}:2: is not JSON: ")


def test_show_tells_no_optimum_of_nothing(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert cli.main(["trace", "show", str(trace), "--block-size", "64"]) == 1

    assert "unknown: no request was read" in capsys.readouterr().out


def test_show_cannot_run_where_there_are_too_many(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    trace.write_text(lines(RECORD) + "nonsense\n")

    assert cli.main(["trace", "show", str(trace), "--max-bad-lines", "0"]) == 2

    assert "more than 0 lines are malformed" in capsys.readouterr().err


def test_show_reads_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines(RECORD).encode())))

    assert cli.main(["trace", "show", "-"]) == 0

    assert "stdin" in capsys.readouterr().out


def test_show_says_that_lengths_alone_share_nothing(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:47,374,44\n"
        "2023-11-16 18:15:46,374,44\n"
    )

    assert cli.main(["trace", "show", str(trace)]) == 0

    printed = capsys.readouterr().out
    assert "unknown: the trace does not tell what is shared" in printed
    assert "not in order" in printed


def test_show_takes_a_tokenizer_for_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[U]": 0}, unk_token="[U]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    trace.write_text(lines({"messages": [{"role": "user", "content": "one two three"}]}))

    assert cli.main(["trace", "show", str(trace), "--tokenizer", str(tmp_path)]) == 0

    assert "4 (4 a request, longest 4)" in capsys.readouterr().out


@pytest.mark.parametrize(("content", "what"), [(None, "No such file"), ("{}", "is no tokenizer")])
def test_a_tokenizer_that_cannot_be_read_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    trace: Path,
    content: str | None,
    what: str,
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)

    assert cli.main(["trace", "show", str(trace), "--tokenizer", str(path)]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"hicache: {path}: ")
    assert what in error
    assert error.count("\n") == 1


def test_generate_writes_a_file_and_prints_its_optimum(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, found = tmp_path / "chat.jsonl.gz", tmp_path / "found.json"
    argv = ["trace", "generate", "chat", "--sessions", "3", "--set", "turns=2"]

    assert cli.main([*argv, "--output", str(path), "--json", str(found)]) == 0

    assert "an infinite cache hits" in capsys.readouterr().out
    counts = json.loads(found.read_text())["trace"]
    assert counts["requests"] == 6
    assert cli.main(["trace", "show", str(path), "--json", str(found)]) == 0
    assert json.loads(found.read_text())["trace"] == {"file": str(path), **counts}


def test_generate_without_a_file_gives_stdout_to_the_trace(
    capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    assert cli.main(["trace", "generate", "rag", "--sessions", "2", "--seed", "5"]) == 0

    printed = capfdbinary.readouterr()
    assert b"an infinite cache hits" in printed.err
    path = tmp_path / "trace"
    path.write_bytes(printed.out)
    assert len(blocks(open_trace(path))) == 2


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["chat", "--rate", "0"], "--rate 0: it must be above 0"),
        (["chats"], "'chats' is no kind of load: chat, system-prompts, rag, agents, tree"),
        (["chat", "--set", "turns"], "command line: --set turns: write --set NAME=VALUE"),
    ],
)
def test_what_cannot_be_generated_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    assert cli.main(["trace", "generate", *argv]) == 2

    printed = capsys.readouterr()
    assert printed.err == f"hicache: {line}\n"
    assert printed.out == ""
