"""The command, from a trace file to its reports."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from hicache.tools.cli import main

LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]},
    {"timestamp": 900, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


def test_a_replay_writes_all_its_reports(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("json", "csv", "html")}
    flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]

    code = main(["replay", trace, "--min", "--sweep", "l1=3p,10p", "--sequential", *flags])

    assert code == 0
    report = json.loads(files["json"].read_text())
    assert [run["hit_rate"]["blocks"]["total"] for run in report["runs"]] == [3 / 8, 4 / 8]
    assert report["runs"][1]["optimum"]["min"] == report["runs"][1]["optimum"]["infinite"] == 4 / 8
    assert report["trace"]["num_unique_pages"] == 4
    assert len(files["csv"].read_text().splitlines()) == 3
    page = files["html"].read_text()
    # A bar for each run; over the size of L1 in all and by tier; over time for each run.
    assert page.count("<svg") == page.count("</svg>") == 1 + 2 + 2
    assert "src=" not in page
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert ET.fromstring(drawing).tag.endswith("svg")
        assert "nan" not in drawing
    assert "Hit rate" in capsys.readouterr().out


def test_one_request_is_explained(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--explain", "2"]) == 0

    assert "pages      0 to      2  hit in L1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--l1", "much"],
        ["--l3", "inf"],
        ["--model", "none"],
        ["--export-to", "stream"],
        ["--export", "csv"],
        ["--explain", "0", "--sweep", "l1=1p,2p"],
        ["--page-size", "24"],
        ["--page-size", "0"],
        ["--l1", "0p"],
        ["--sessions", "2"],
        ["--eviction", "best"],
        ["--write", "no.such:policy"],
        ["--prefetch", "tests.replay.policies:nothing"],
        ["--prefetch", "tests.replay.policies:youngest"],
        ["--write", "tests.replay.policies:youngest"],
        ["--eviction", "tests.replay.policies:NO_POLICY"],
        ["--bytes-per-token", "0"],
        ["--format", "mooncak"],
        ["--tokenizer", "absent.json"],
        ["--explain", "9"],
        ["--json", "no/such/folder/report.json"],
        ["--html", "no/such/folder/report.html"],
        ["--csv", "no/such/folder/report.csv"],
        ["--host-gbps", "0"],
        ["--host-latency-us", "inf"],
        ["--export", "oracle-general", "--json", "report.json"],
        ["--export", "oracle-general", "--sweep", "page_size=256,512"],
    ],
)
def test_what_cannot_be_run_ends_with_one_line_and_code_2(
    trace: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, *flags]) == 2

    said = capsys.readouterr().err
    assert said.startswith("hicache: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "No such file or directory"),
        (b"", "it is empty"),
        (b"nonsense\n", "it looks like none of hicache, "),
        (bytes(range(256)), "is not JSON"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "the trace has no requests"),
    ],
)
def test_a_trace_that_cannot_be_replayed_ends_with_one_line_and_code_2(
    tmp_path: Path, content: bytes | None, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    if content is not None:
        path.write_bytes(content)

    assert main(["replay", str(path)]) == 2

    said = capsys.readouterr().err
    assert what in said
    assert said.count("\n") == 1


def test_malformed_lines_are_told_and_give_code_1(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(trace).open("a") as file:
        file.write("nonsense\n")

    assert main(["replay", trace]) == 1

    printed = capsys.readouterr()
    assert printed.err.startswith(f"hicache: {trace}:4: is not JSON")
    assert "3 requests" in printed.out
    assert main(["replay", trace, "--max-bad-lines", "0"]) == 2


def test_page_sizes_may_be_swept(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    argv = ["replay", trace, "--sequential", "--sweep", "page_size=256,512,1024"]
    assert main([*argv, "--json", str(path)]) == 0

    runs = json.loads(path.read_text())["runs"]
    assert [run["config"]["page_size"] for run in runs] == [256, 512, 1024]
    assert [run["pages"]["referred"] for run in runs] == [13, 8, 5]
    found = [run["hit_rate"]["tokens"]["total"] for run in runs]
    # The first block again for the second request; all, or all but its end, for the third.
    assert found == [(512 + 1100) / 2800, (512 + 1100) / 2800, (512 + 1024) / 2800]


def test_a_trace_comes_from_stdin_too(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = io.BytesIO(Path(trace).read_bytes())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content))

    assert main(["replay", "-", "--sweep", "page_size=256,512"]) == 0

    assert "page_size=256" in capsys.readouterr().out


def test_help_of_other_commands_loads_nothing_of_the_replay() -> None:
    script = (
        "import sys; from hicache.tools.cli import main; main(['--help']); "
        "print([name for name in sys.modules if name.startswith('hicache.tools.replay.')])"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == "['hicache.tools.replay.options']"
