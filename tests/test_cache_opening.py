"""How much of a disk a store may have, where nobody says."""

import os
from pathlib import Path

import pytest

from hicache.cache.opening import open_parts
from hicache.config import CacheConfig
from hicache.errors import ConfigError
from hicache.layout import KVLayout

MIB = 2**20
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=16)


def disk_with(free_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every disk have so much room left."""
    real = os.statvfs("/")
    values = list(real)
    values[0], values[1], values[4] = 1, 1, free_nbytes
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))


def budget(path: Path, backend: str = "memory") -> int | None:
    """Return what a store there would be given."""
    storage = {"backend": backend, "path": path}
    config = CacheConfig.model_validate(
        {"page_size": 16, "device": {"size": "4p"}, "host": {"size": "32p"}, "storage": storage}
    )
    parts = open_parts(LAYOUT, config, "cpu", clock=lambda: 0.0)
    parts.close(1)
    return parts.store_nbytes


def test_a_store_gets_half_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_with(100 * MIB, monkeypatch)

    assert budget(tmp_path / "store") == 50 * MIB


def test_what_a_store_holds_already_is_no_loss_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every restart would throw half of it away."""
    folder = tmp_path / "store" / "segments"
    folder.mkdir(parents=True)
    (folder / "one").write_bytes(bytes(30 * MIB))
    disk_with(70 * MIB, monkeypatch)

    found = budget(tmp_path / "store")

    assert found is not None
    assert 50 * MIB <= found <= 51 * MIB


def test_a_disk_that_is_full_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_with(1 * MIB, monkeypatch)

    with pytest.raises(ConfigError) as raised:
        budget(tmp_path / "store", "lmdb")

    assert str(raised.value) == (
        f"{tmp_path / 'store'}: a store needs 4 MiB or more; cache.storage.size = auto makes it "
        "0.5 MiB, half of what its disk has left"
    )


def test_a_mistake_that_is_not_the_disk_s_is_not_blamed_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_with(100 * MIB, monkeypatch)

    with pytest.raises(ConfigError, match=r"^no storage backend 'lmbd'") as raised:
        budget(tmp_path / "store", "lmbd")

    assert "disk" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "memory up to 0.00 GB in {path}, best_effort,"),
        ({"codec": "zstd-planes"}, "best_effort, zstd-planes,"),
        ({"key": "5a" * 32}, "best_effort, encrypted,"),
        ({"codec": "zstd", "key_file": "{path}.key"}, "best_effort, zstd, encrypted,"),
    ],
)
def test_how_pages_are_stored_is_said(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    path = tmp_path / "store"
    key_file = tmp_path / "store.key"
    key_file.touch(0o600)
    key_file.write_text("a5" * 32)
    storage = {name: value.format(path=path) for name, value in settings.items()}
    config = CacheConfig.model_validate(
        {
            "page_size": 16,
            "device": {"size": "4p"},
            "host": {"size": "32p"},
            "storage": {"backend": "memory", "path": path, "size": "1MB", **storage},
        }
    )

    parts = open_parts(LAYOUT, config, "cpu", clock=lambda: 0.0)
    described = parts.describe()[2]
    parts.close(1)

    assert said.format(path=path) in f"{described},"
