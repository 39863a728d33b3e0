"""How a check is declared, and found again."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from hicache.testing.records import Subject

Needs = Literal["backend", "reopen", "bounded"]
"""What a check is run on: an empty store; one that can be opened anew; one of 8 MiB."""

Body = Callable[[Subject], Awaitable[None]]

_checks: list["Check"] = []


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of the contract, and the function that tries it."""

    name: str
    """The name of its function: a sentence."""
    promise: str
    """What must hold, and why, for the author of a backend that does not."""
    needs: Needs
    run: Body
    module: str

    @property
    def title(self) -> str:
        """The name as a person reads it."""
        return self.name.replace("_", " ")


def check(body: Body) -> Body:
    """Declare a check that needs an open, empty backend with room for 64 MiB."""
    return _declare(body, "backend")


def check_reopened(body: Body) -> Body:
    """Declare a check that also opens the store anew."""
    return _declare(body, "reopen")


def check_bounded(body: Body) -> Body:
    """Declare a check that needs a backend with a budget of 8 MiB."""
    return _declare(body, "bounded")


def registered(module: str) -> list[Check]:
    """Return the checks of a module, in the order in which they stand there."""
    return [one for one in _checks if one.module == module]


def _declare(body: Body, needs: Needs) -> Body:
    promise = " ".join((inspect.getdoc(body) or "").split())
    _checks.append(Check(body.__name__, promise, needs, body, body.__module__))
    return body
