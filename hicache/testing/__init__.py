"""What authors of backends test with."""

import pytest

from hicache.testing.faulty import (
    Chances,
    Fault,
    FaultyBackend,
    Gate,
    Tamper,
    flip,
    lose,
    truncate,
)

pytest.register_assert_rewrite("hicache.testing.conformance")

from hicache.testing.conformance import BackendTests  # noqa: E402 (rewritten, so after that)

__all__ = [
    "BackendTests",
    "Chances",
    "Fault",
    "FaultyBackend",
    "Gate",
    "Tamper",
    "flip",
    "lose",
    "truncate",
]
