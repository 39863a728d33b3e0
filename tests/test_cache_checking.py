"""Storage that cannot be had is said before a model is loaded, with the name of the setting."""

from pathlib import Path

import pytest

from hicache.cache.checking import check_storage
from hicache.config import CacheConfig
from hicache.errors import ConfigError


def refusal(tmp_path: Path, host: str = "1GB", **storage: object) -> str:
    settings = {"path": tmp_path, "size": "1GB"} | storage
    with pytest.raises(ConfigError) as caught:
        check_storage(CacheConfig.model_validate({"host": {"size": host}, "storage": settings}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_setting_that_cannot_work_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "store"

    assert refusal(tmp_path, backend="lmbd").startswith("cache.storage.backend: no storage backend")
    assert refusal(tmp_path, options={"a": 1}).startswith("cache.storage.options.a: no such option")
    assert refusal(tmp_path, size="1kB").startswith("cache.storage.size: ")
    assert refusal(tmp_path, key_file=below).startswith(f"cache.storage.key_file: {below}: ")
    assert refusal(tmp_path, path=below) == f"cache.storage.path: {below}: Not a directory"


def test_what_only_the_layout_can_tell_is_left_for_later(tmp_path: Path) -> None:
    for storage in (
        {"size": "2p", "path": tmp_path / "a"},
        {"size": "auto", "path": tmp_path / "b"},
        {"backend": "memory", "path": Path("/proc/self/store")},
        {"backend": "none", "path": Path("/proc/self/store")},
    ):
        check_storage(CacheConfig.model_validate({"storage": storage}))

    assert (tmp_path / "a").is_dir()
    nowhere = {"host": {"size": "none"}, "storage": {"path": Path("/proc/self/store")}}
    check_storage(CacheConfig.model_validate(nowhere))
