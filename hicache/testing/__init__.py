"""What authors of backends test with.

``BackendTests`` needs pytest, ``BackendMachine`` hypothesis; the rest needs neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hicache.testing.faulty import (
    Chances,
    Fault,
    FaultyBackend,
    Gate,
    Tamper,
    flip,
    lose,
    tear,
    truncate,
)

if TYPE_CHECKING:
    from hicache.testing.conformance import BackendTests
    from hicache.testing.machine import BackendMachine

__all__ = [
    "BackendMachine",
    "BackendTests",
    "Chances",
    "Fault",
    "FaultyBackend",
    "Gate",
    "Tamper",
    "flip",
    "lose",
    "tear",
    "truncate",
]

_MODULES = {"BackendTests": "conformance", "BackendMachine": "machine"}
"""What is imported only when it is asked for, since not everybody has what it needs."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
