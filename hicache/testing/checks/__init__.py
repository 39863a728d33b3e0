"""What every ``StorageBackend`` must do: one async function a promise, and no test framework.

``BackendTests`` runs them under pytest, ``hicache backends check`` without it. A check raises
``CheckFailed``, or lets through what the backend raised.
"""

from hicache.testing.checks import batches, budget, calls, changes, lasting, walking
from hicache.testing.checks.registry import Check, Needs, registered

__all__ = ["CHECKS", "Check", "Needs"]

_MODULES = (batches, changes, calls, lasting, budget, walking)

CHECKS: list[Check] = [check for module in _MODULES for check in registered(module.__name__)]
"""All of them, the simplest first: what fails early explains what fails later."""
