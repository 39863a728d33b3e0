"""The check for GPUs, as far as it runs without one."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hicache.tools.gpucheck import running
from hicache.tools.gpucheck.__main__ import main
from hicache.tools.gpucheck.findings import Report, table, to_json

NOT_IN_A_PLAIN_IMAGE = (
    "aiofiles",
    "cryptography",
    "flashinfer",
    "lmdb",
    "prometheus_client",
    "pydantic",
    "pydantic_core",
    "pydantic_settings",
    "rich",
    "typer",
    "xxhash",
    "zstandard",
)


@pytest.fixture
def plain_image(tmp_path: Path) -> dict[str, str]:
    """Return the environment of an interpreter that has no more than a plain CUDA image."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("platlib")).iterdir():
        name = path.name.partition("-")[0].partition(".")[0].lower()
        if name not in NOT_IN_A_PLAIN_IMAGE and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    root = Path(__file__).parent.parent
    return {**os.environ, "PYTHONPATH": f"{packages}:{root}", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_every_section_runs_dry_with_no_more_than_torch_and_transformers(
    tmp_path: Path, plain_image: dict[str, str]
) -> None:
    where = tmp_path / "found.json"
    command = [sys.executable, "-S", "-m", "hicache.tools.gpucheck"]

    done = subprocess.run(
        [*command, "--device", "cpu", "--in-process", "--json", str(where)],
        env=plain_image,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(where.read_text())
    assert [section["section"] for section in found["sections"]] == list(running.SECTIONS)
    assert {section["status"] for section in found["sections"]} == {"right"}
    assert all(section["results"] for section in found["sections"][1:])
    assert "not installed, and stood in for: pydantic, xxhash, rich, zstandard" in done.stdout


def test_all_sections_together_take_less_than_eight_minutes() -> None:
    assert sum(running.SECTIONS.values()) < 480


def test_there_is_nothing_to_run_where_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert main([]) == 2
    assert main(["--device", "gpu"]) == 2

    assert capsys.readouterr().err.splitlines() == [
        "gpucheck: there is no CUDA device here; --device cpu is a dry run of every section",
        "gpucheck: 'gpu' is no device: cuda, cuda:1, … or cpu",
    ]


# ---------------------------------------------------------------- sections that come to grief


def child(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


def test_a_section_that_hangs_is_killed_and_what_it_said_is_kept() -> None:
    report = Report("copies", 80.0)
    report.result("bytes are equal", True)
    script = f"import time\nprint('gpucheck-report:' + {report.written()!r}, flush=True)\n"

    found = running.run_apart("copies", "cpu", child(script + "time.sleep(60)"), budget_s=2.0)

    assert (found.status, found.why) == ("died", "it did not end in 2 s and was killed")
    assert [result.name for result in found.results] == ["bytes are equal"]
    assert not found.is_fine


def test_a_section_whose_process_dies_is_reported() -> None:
    found = running.run_apart("leaks", "cpu", child("import os; os.abort()"))

    assert (found.status, found.why) == ("died", "its process ended with code -6")


def test_a_section_that_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(room: object, report: Report) -> None:
        report.note("before")
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr("hicache.tools.gpucheck.here.run", run)

    found = running.run_here("here", "cpu")

    assert (found.status, found.notes) == ("died", ["before"])
    assert found.why == "RuntimeError: no kernel image is available"


def test_a_wrong_result_is_a_wrong_section() -> None:
    report = Report("copies", 80.0)

    report.result("bytes are equal", True)
    was_fine = report.is_fine
    report.result("bytes are equal again", False, "3 pages")
    report.figure("load", 12.345, "GB/s")

    shown = table([report])
    assert [was_fine, report.is_fine] == [True, False]
    assert "WRONG  bytes are equal again  3 pages" in shown
    assert "2 results, 1 wrong; 0 of 1 sections died" in shown
    assert json.loads(to_json([report], "cpu"))["is_fine"] is False


def test_what_was_told_is_read_again() -> None:
    report = Report("copies", 80.0, seconds=1.5)
    report.result("bytes are equal", True, "8 pages")
    report.figure("load", 12.5, "GB/s")
    report.note("no time")

    assert Report.read(report.written()) == report
