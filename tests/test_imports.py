"""What is not loaded: tools and libraries start fast, and run where there is no GPU stack."""

import json
import subprocess
import sys

import pytest

STACK = ["torch", "transformers", "fastapi", "flashinfer"]
STORE = ("exporting", "importing", "ls", "removing", "stat", "texts", "verify")
"""The commands of ``hicache store``."""


def loaded_by(statement: str) -> list[str]:
    """Return what of the GPU stack a fresh interpreter has loaded after a statement."""
    script = (
        f"import json, sys\n{statement}\n"
        f"print(json.dumps([name for name in {STACK} if name in sys.modules]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    found: list[str] = json.loads(done.stderr.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "module",
    [
        "hicache",
        "hicache.config",
        "hicache.planner",
        "hicache.store",
        "hicache.testing",
        "hicache.backends.file",
        "hicache.backends.lmdb",
        "hicache.backends.memory",
        "hicache.tools.replay.command",
        *(f"hicache.tools.store.{name}" for name in STORE),
    ],
)
def test_a_module_brings_in_no_gpu_stack(module: str) -> None:
    assert loaded_by(f"import {module}") == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["bench", "--help"],
        ["backends", "list"],
        ["replay", "--help"],
        ["store", "import", "--help"],
        ["trace", "generate", "chat", "--sessions", "1"],
    ],
)
def test_a_command_that_runs_no_model_brings_in_no_gpu_stack(argv: list[str]) -> None:
    assert loaded_by(f"from hicache.tools.cli import main; assert main({argv}) == 0") == []


def test_the_check_itself_notices_the_stack() -> None:
    assert loaded_by("sys.modules['torch'] = sys") == ["torch"]
