"""Backends are found by name or by class, and every mistake is one clear line."""

import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import ClassVar, Self

import pytest

from hicache import plugins
from hicache.backends.memory import MemoryBackend
from hicache.errors import ConfigError
from hicache.plugins import backend_class, installed, make_backend
from hicache.storage import BackendOptions, StorageBackend


class Options(BackendOptions):
    """Options of a third party."""

    url: str
    """Where it is."""
    retries: int = 3


class ThirdParty(MemoryBackend):
    options_type: ClassVar[type[BackendOptions]] = Options

    @classmethod
    def create(
        cls, options: BackendOptions, *, path: Path | None, budget_nbytes: int | None
    ) -> Self:
        assert isinstance(options, Options)
        made = cls(budget_nbytes)
        made.options, made.path = options, path
        return made

    options: Options
    path: Path | None


class Plain(StorageBackend):
    """Says nothing about how it is made."""

    get = MemoryBackend.get
    put = MemoryBackend.put
    contains = MemoryBackend.contains
    delete = MemoryBackend.delete
    touch = MemoryBackend.touch
    scan = MemoryBackend.scan
    stats = MemoryBackend.stats


class FromTheFuture(MemoryBackend):
    contract_version: ClassVar[int] = 2


class Unfinished(StorageBackend):
    """Lacks all its methods."""


@pytest.fixture(autouse=True)
def third_party() -> Iterator[str]:
    """A module that a third party might ship."""
    module = types.ModuleType("third_party")
    vars(module).update(
        ThirdParty=ThirdParty,
        Plain=Plain,
        FromTheFuture=FromTheFuture,
        Unfinished=Unfinished,
        number=7,
    )
    sys.modules["third_party"] = module
    yield "third_party"
    del sys.modules["third_party"]


def error_of(name: str, **options: object) -> str:
    with pytest.raises(ConfigError) as raised:
        make_backend(name, options, path=None, budget_nbytes=None)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_our_backends_are_installed() -> None:
    found = {backend.name: backend for backend in installed()}

    assert found["memory"].target == "hicache.backends.memory:MemoryBackend"
    assert found["memory"].distribution.startswith("hicache ")
    assert list(found) == sorted(found)


def test_a_backend_is_found_by_name_or_by_class() -> None:
    assert backend_class("memory") is MemoryBackend
    assert backend_class("hicache.backends.memory:MemoryBackend") is MemoryBackend


def test_a_backend_is_made_from_its_options_path_and_budget(tmp_path: Path) -> None:
    made = make_backend("third_party:ThirdParty", {"url": "x"}, path=tmp_path, budget_nbytes=1000)

    assert isinstance(made, ThirdParty)
    assert made.options == Options(url="x", retries=3)
    assert made.path == tmp_path


def test_a_backend_without_options_needs_none() -> None:
    made = make_backend("memory", {}, path=None, budget_nbytes=None)

    assert isinstance(made, MemoryBackend)


def test_the_plainest_backend_is_made_without_anything() -> None:
    made = make_backend("third_party:Plain", {}, path=None, budget_nbytes=None)

    assert isinstance(made, Plain)


def test_an_unknown_name_says_what_there_is() -> None:
    message = error_of("memmory")

    assert message.startswith("no storage backend 'memmory' (did you mean memory?); installed: ")
    assert "lmdb, memory" in message
    assert "did you mean" not in error_of("zzz")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Backend", "ModuleNotFoundError: No module named 'nowhere'"),
        ("third_party:Nothing", "AttributeError"),
        ("third_party:", "AttributeError"),
        (":ThirdParty", "ValueError"),
        ("third_party:number", "third_party:number is no StorageBackend"),
        ("third_party:Unfinished", "lacks contains, delete, get, put, scan, stats, touch"),
        ("third_party:FromTheFuture", "keeps version 2 of the storage contract"),
    ],
)
def test_what_is_no_backend_says_why(name: str, message: str) -> None:
    assert message in error_of(name)


def test_options_are_checked_by_the_backend() -> None:
    name = "third_party:ThirdParty"

    assert error_of(name) == "storage.options.url: Field required"
    assert error_of(name, url="x", retries="many").startswith("storage.options.retries: Input")
    assert error_of(name, url="x", typo=1) == (
        "storage.options.typo: no such option; third_party:ThirdParty has: url, retries"
    )
    assert error_of("memory", typo=1) == "storage.options.typo: no such option; memory has: none"


def test_an_entry_point_of_no_known_package_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("odd", "third_party:ThirdParty", plugins.GROUP)])
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: points.select(**wanted))

    assert [(backend.name, backend.distribution) for backend in installed()] == [("odd", "unknown")]
    assert backend_class("odd") is ThirdParty
