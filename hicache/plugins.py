"""Finds storage backends that are installed, or named by their class, and makes them.

A package offers a backend through an entry point of the group ``hicache.backends``::

    [project.entry-points."hicache.backends"]
    mine = "my_package.backend:MyBackend"

Nothing of a backend is imported before it is asked for.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from pydantic import ValidationError

from hicache.errors import ConfigError
from hicache.storage import CONTRACT_VERSION, BackendOptions, StorageBackend

GROUP = "hicache.backends"


@dataclass(frozen=True, slots=True)
class InstalledBackend:
    """A backend that a package offers."""

    name: str
    target: str
    """``package.module:Class``."""
    distribution: str
    """The package that brought it, with its version."""


def installed() -> list[InstalledBackend]:
    """Return the backends that are there, by name. Imports none of them."""
    found = {
        point.name: InstalledBackend(
            point.name,
            point.value,
            f"{point.dist.name} {point.dist.version}" if point.dist else "unknown",
        )
        for point in entry_points(group=GROUP)
    }
    return [found[name] for name in sorted(found)]


def backend_class(name: str) -> type[StorageBackend]:
    """Return the class of an installed backend, or of ``package.module:Class``.

    Raises ``ConfigError`` in one line that says what is wrong, and what there is.
    """
    if ":" in name:
        point = EntryPoint(name, name, GROUP)
    else:
        points = entry_points(group=GROUP, name=name)
        if not points:
            raise ConfigError(_unknown(name))
        point = next(iter(points))
    found = _import(name, point)
    if not (isinstance(found, type) and issubclass(found, StorageBackend)):
        raise ConfigError(f"storage backend {name}: {point.value} is no StorageBackend")
    if found.contract_version != CONTRACT_VERSION:
        raise ConfigError(
            f"storage backend {name} keeps version {found.contract_version} of the storage "
            f"contract, this HiCache has version {CONTRACT_VERSION}: install a matching release"
        )
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"storage backend {name} lacks {', '.join(missing)}")
    return found


def make_backend(
    name: str, options: Mapping[str, object], *, path: Path | None, budget_nbytes: int | None
) -> StorageBackend:
    """Return a backend that is not open yet.

    ``options`` is what ``[storage.options]`` says, checked by the backend's own model. Raises
    ``ConfigError`` in one line.
    """
    found = backend_class(name)
    return found.create(
        _checked(name, found.options_type, options), path=path, budget_nbytes=budget_nbytes
    )


def _import(name: str, point: EntryPoint) -> object:
    """Return what an entry point names.

    Whatever a third party's module raises while it is imported is a setting that does not work.
    """
    module, _, attribute = point.value.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(f"storage backend {name}: {type(error).__name__}: {error}") from error
    return found


def _unknown(name: str) -> str:
    names = [backend.name for backend in installed()]
    close = get_close_matches(name, names, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"no storage backend {name!r}{hint}; installed: {', '.join(names)}"


def _checked(
    name: str, options_type: type[BackendOptions], options: Mapping[str, object]
) -> BackendOptions:
    try:
        return options_type.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = ", ".join(options_type.model_fields) or "none"
            message = f"no such option; {name} has: {known}"
        raise ConfigError(f"storage.options.{option}: {message}") from None
