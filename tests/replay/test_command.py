"""The command, from a trace file to its reports."""

import json
import re
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
    ],
)
def test_what_cannot_be_run_ends_with_one_line_and_code_2(
    trace: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, *flags]) == 2

    said = capsys.readouterr().err
    assert said.startswith("hicache: ")
    assert said.count("\n") == 1
