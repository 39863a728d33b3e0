"""What holds for every test: one thread for torch, no hub, no settings from outside."""

import os

# Before anything imports torch or transformers, which read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import importlib.util
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure, and what fails once must fail again.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run soak tests at their full sizes")


@pytest.fixture
def is_full(request: pytest.FixtureRequest) -> bool:
    """Whether a soak test should take the minutes it needs, rather than show that it runs."""
    return bool(request.config.getoption("--full"))


@cache
def why_no_gpu() -> str | None:
    """Return why tests that need CUDA cannot run here; ``None`` where they can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "there is no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None and (reason := why_no_gpu()) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("HICACHE_"):
            monkeypatch.delenv(name)
