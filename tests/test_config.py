"""Settings: what wins, and the line that a mistake gets."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel

from hicache.config import CacheConfig, Config, HostConfig, Section, load
from hicache.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text)
    return path


def line_of(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> str:
    """Return the one line that refuses these settings."""
    with pytest.raises(ConfigError) as caught:
        load(path, environ or {}, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


# ---------------------------------------------------------------- what wins


def test_without_a_file_the_defaults_hold() -> None:
    config = load(environ={})

    assert config == Config()
    assert config.cache.page_size == 64


def test_a_file_sets_what_it_names(tmp_path: Path) -> None:
    path = write(tmp_path, '[cache.host]\nsize = "30000p"\n')

    config = load(path, environ={})

    assert config == Config(cache=CacheConfig(host=HostConfig(size="30000p")))


def test_the_environment_wins_over_the_file_and_a_flag_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = 1\n[cache]\npage_size = 1\n[engine]\nmax_batch = 1\n")
    environ = {"HICACHE_SERVER__PORT": "2", "HICACHE_CACHE__PAGE_SIZE": "2", "HOME": "/root"}

    config = load(path, environ, overrides={"server.port": 3, "server.host": None})

    found = (config.server.port, config.cache.page_size, config.engine.max_batch)
    assert found == (3, 2, 1)
    assert config.server.host == "127.0.0.1"


def test_the_environment_of_the_process_is_read_when_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HICACHE_CACHE__STORAGE__BACKEND", "file")

    assert load().cache.storage.backend == "file"


def test_options_of_a_backend_are_left_to_the_backend(tmp_path: Path) -> None:
    path = write(tmp_path, "[cache.storage.options]\nlevel = 3\n")

    config = load(path, {"HICACHE_CACHE__STORAGE__OPTIONS__MODE": "fast"})

    assert config.cache.storage.options == {"level": 3, "mode": "fast"}


def test_settings_do_not_change_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().cache.page_size = 1


# ---------------------------------------------------------------- what a mistake gets


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[cache.host]\nsise = 1", "cache.host.sise: no such setting"),
        ("[cashe]\npage_size = 1", "cashe: no such setting"),
        ("cache = 3", "cache: is a table, not a value"),
        (
            '[cache]\npage_size = "many"',
            "cache.page_size: Input should be a valid integer, "
            "unable to parse string as an integer",
        ),
        ("[cache]\npage_size = 0", "cache.page_size: Input should be greater than 0"),
        ("[server]\nport = 65536", "server.port: Input should be less than or equal to 65535"),
        (
            '[cache.device]\nsize = "8 apples"',
            "cache.device.size: '8 apples' is no size: "
            "write 30000p (pages), 2M (tokens) or 8GB (bytes)",
        ),
        (
            '[cache.device]\nsize = "none"',
            "cache.device.size: 'none' is no size: "
            "write 30000p (pages), 2M (tokens) or 8GB (bytes)",
        ),
        (
            '[cache.host]\nwrite_policy = "sometimes"',
            "cache.host.write_policy: Input should be "
            "'write_through', 'write_through_selective' or 'write_back'",
        ),
        (
            '[engine]\nattention = "flash"',
            "engine.attention: Input should be 'auto', 'torch' or 'flashinfer'",
        ),
    ],
)
def test_a_mistake_in_a_file_is_told_with_the_file_and_the_name(
    tmp_path: Path, text: str, line: str
) -> None:
    path = write(tmp_path, text)

    assert line_of(path) == f"{path}: {line}"


def test_a_file_that_is_not_toml_is_told_with_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[cache]\n\npage_size 64\n")

    line = line_of(path)

    assert line.startswith(f"{path}: ")
    assert "line 3" in line


def test_a_file_that_is_not_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xff\xfe\x00")

    assert line_of(path).startswith(f"{path}: 'utf-8' codec can't decode byte 0xff")


def test_a_file_that_is_absent_is_told(tmp_path: Path) -> None:
    path = tmp_path / "absent.toml"

    assert line_of(path) == f"{path}: No such file or directory"


def test_a_directory_is_told(tmp_path: Path) -> None:
    assert line_of(tmp_path) == f"{tmp_path}: Is a directory"


def test_a_mistake_in_the_environment_is_told_with_the_variable(tmp_path: Path) -> None:
    path = write(tmp_path, "[cache]\npage_size = 16\n")

    assert line_of(path, {"HICACHE_CACHE__SISE": "1"}) == (
        "HICACHE_CACHE__SISE: cache.sise: no such setting"
    )
    assert line_of(path, {"HICACHE_CACHE__PAGE_SIZE": "-1"}) == (
        "HICACHE_CACHE__PAGE_SIZE: cache.page_size: Input should be greater than 0"
    )


def test_a_variable_inside_a_value_is_told_with_the_variable(tmp_path: Path) -> None:
    path = write(tmp_path, "[cache]\npage_size = 16\n")
    environ = {"HICACHE_CACHE__PAGE_SIZE__X": "1"}

    assert line_of(path, environ) == (
        "HICACHE_CACHE__PAGE_SIZE__X: cache.page_size.x: page_size is a value, not a table"
    )
    assert line_of(None, environ).startswith("HICACHE_CACHE__PAGE_SIZE__X: cache.page_size: ")


def test_a_mistake_in_a_flag_is_told_as_such() -> None:
    line = line_of(overrides={"engine.device_name": "cpu"})

    assert line == "command line: engine.device_name: no such setting"


def test_a_mistake_inside_a_table_that_was_given_is_told_with_what_gave_the_table() -> None:
    line = line_of(overrides={"cache": {"host": {"sise": "1"}}})

    assert line == "command line: cache.host.sise: no such setting"


# ---------------------------------------------------------------- what is shipped


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path: Path) -> None:
    load(path, environ={})


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_file_is_commented(path: Path) -> None:
    assert path.read_text().startswith("# ")


def tables(model: type[BaseModel]) -> list[type[BaseModel]]:
    below = [
        field.annotation
        for field in model.model_fields.values()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    ]
    return [model, *(table for child in below for table in tables(child))]


@pytest.mark.parametrize("table", tables(Config), ids=lambda table: table.__name__)
def test_every_setting_says_what_it_means(table: type[BaseModel]) -> None:
    silent = [
        name
        for name, field in table.model_fields.items()
        if field.description is None and field.annotation not in tables(Config)
    ]

    assert silent == []
