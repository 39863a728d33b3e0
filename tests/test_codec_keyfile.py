"""Where master keys come from, and what is said where they do not."""

import os
import sys
from base64 import b64encode
from pathlib import Path

import pytest

from hicache.codec import open_keyring
from hicache.config import StorageConfig, load
from hicache.errors import ConfigError

ONE, TWO = bytes(range(32)), bytes(range(1, 33))


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def names(config: StorageConfig) -> list[bytes]:
    """Return what each key calls a page: equal for equal keys only."""
    keyring = open_keyring(config)
    assert keyring is not None
    return [master.name(b"page") for master in keyring.masters]


def test_without_a_key_nothing_is_sealed() -> None:
    assert open_keyring(StorageConfig()) is None


def test_a_file_may_hold_several_keys_and_comments(tmp_path: Path) -> None:
    text = f"# since May\n{ONE.hex()}\n\n  {b64encode(TWO).decode()}  # until May\n"

    found = names(StorageConfig(key_file=write(tmp_path, text)))

    by_text = StorageConfig.model_validate({"key": f"{ONE.hex()}\n{TWO.hex()}"})
    assert found == names(by_text)
    assert len(set(found)) == 2


def test_the_environment_may_hold_the_key(tmp_path: Path) -> None:
    environ = {"HICACHE_CACHE__STORAGE__KEY": ONE.hex()}

    config = load(None, environ).cache.storage

    assert names(config) == names(StorageConfig(key_file=write(tmp_path, ONE.hex())))
    assert ONE.hex() not in repr(config)
    assert ONE.hex() not in config.model_dump_json()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path, ONE.hex(), mode)

    with pytest.raises(
        ConfigError,
        match=rf"^cache\.storage\.key_file: .*keys: others may .* \(mode {mode:04o}\): chmod",
    ):
        open_keyring(StorageConfig(key_file=path))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no key in it"),
        ("# nothing\n\n", "there is no key in it"),
        ("swordfish\n", "line 1: no key of 32 bytes"),
        (f"{ONE.hex()}\n{ONE.hex()[:-2]}\n", "line 2: no key of 32 bytes"),
        (f"{b64encode(ONE[:-1]).decode()}\n", "line 1: no key of 32 bytes"),
        ("\x80\x81é\n", "line 1: no key of 32 bytes"),
        (f"{ONE.hex()}\n{b64encode(ONE).decode()}\n", "a key is in it twice"),
    ],
)
def test_a_file_without_a_key_is_refused_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = write(tmp_path, text)

    with pytest.raises(ConfigError, match=why) as caught:
        open_keyring(StorageConfig(key_file=path))

    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert ONE.hex()[:-2] not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cache\.storage\.key_file: .*none: No such file"):
        open_keyring(StorageConfig(key_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match="Is a directory"):
        open_keyring(StorageConfig(key_file=tmp_path))
    with pytest.raises(ConfigError, match=r"^cache\.storage\.key_file: .* must be a regular file"):
        open_keyring(StorageConfig(key_file=Path(os.devnull)))


def test_two_sources_of_keys_are_one_too_many(tmp_path: Path) -> None:
    config = StorageConfig.model_validate({"key_file": tmp_path / "keys", "key": ONE.hex()})

    with pytest.raises(ConfigError, match="key_file and key are both set"):
        open_keyring(config)


def test_where_cryptography_is_missing_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cryptography.exceptions", "cryptography.hazmat.primitives.ciphers.aead"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError, match=r"pip install 'hicache\[crypto\]'"):
        open_keyring(StorageConfig(key_file=write(tmp_path, ONE.hex())))
