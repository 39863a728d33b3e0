"""What a plain CUDA image may lack of HiCache's dependencies, in the little that is needed here.

For the check's own processes only, where nothing can be installed. Settings are not validated,
checksums are another hash (and slower): right for a check, wrong for a server.

They are there only while HiCache's own modules are imported: transformers looks whether such
packages are installed, and must find that they are not.
"""

import importlib
import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

FOR_WHAT = {
    "pydantic": "settings",
    "xxhash": "checksums of L3",
    "rich": "progress bars",
    "lmdb": "the default L3",
    "aiofiles": "the L3 of files",
    "zstandard": "compressed L3",
    "flashinfer": "the fast attention",
    "triton": "the kernel of the staging ring",
}
"""What each package that may be missing is for."""


def missing() -> list[str]:
    """Return which of those packages are not installed."""
    return [name for name in FOR_WHAT if not _is_there(name)]


_OF_TRANSFORMERS = (
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "LlamaForCausalLM",
    "PreTrainedConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
)
_OURS = (
    "hicache.config",
    "hicache.codec",
    "hicache.plugins",
    "hicache.cache",
    "hicache.backends.memory",
    "hicache.engine.engine",
)
"""Modules that import what is stood in for, themselves or through others."""


def install() -> list[str]:
    """Import our modules, with stand-ins for what they lack; return the names of those."""
    makers = {"pydantic": _pydantic, "xxhash": _xxhash, "rich": _rich, "zstandard": _zstandard}
    replaced = [name for name in makers if not _is_there(name)]
    if not replaced:
        return []
    transformers = importlib.import_module("transformers")
    for name in _OF_TRANSFORMERS:
        getattr(transformers, name)  # imported when it is first looked at
    standing_in = [module for name in replaced for module in makers[name]()]
    for module in standing_in:
        sys.modules[module.__name__] = module
    try:
        for name in _OURS:
            importlib.import_module(name)
        if _is_there("aiofiles"):
            importlib.import_module("hicache.backends.file")
        if _is_there("lmdb"):
            importlib.import_module("hicache.backends.lmdb")
    finally:
        for module in standing_in:
            del sys.modules[module.__name__]
    return replaced


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _module(name: str, **content: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


# ---------------------------------------------------------------- pydantic


class ValidationError(Exception):
    """A setting that there is not."""

    def errors(self) -> list[dict[str, Any]]:
        """Return what is wrong."""
        return [{"type": "missing", "loc": self.args[1:], "msg": self.args[0]}]


class Default:
    """What ``Field`` returns: a value to begin with, made anew."""

    def __init__(self, default: object = None, *, default_factory: Any = None, **_: object) -> None:
        self.make = default_factory or (lambda: default)


class BaseModel:
    """Values under the names of a class, nested ones made from dictionaries. Checks names only."""

    def __init__(self, **values: object) -> None:
        hints = get_type_hints(type(self))
        for name, hint in hints.items():
            if name in values:
                value = _converted(hint, values.pop(name))
            elif hasattr(type(self), name):
                value = getattr(type(self), name)
                value = value.make() if isinstance(value, Default) else value
            else:
                raise ValidationError("is missing", name)
            object.__setattr__(self, name, value)
        if values:
            raise ValidationError("no such setting", *values)

    @classmethod
    def model_validate(cls, values: Any) -> Any:
        """Return an instance with these values."""
        return values if isinstance(values, cls) else cls(**values)


def _converted(hint: Any, value: object) -> object:
    kinds = get_args(hint) or (hint,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
            return kind(**value)
        if kind is Path and isinstance(value, str):
            return Path(value)
    return value


class AfterValidator:
    """A check that is not made."""

    def __init__(self, check: object) -> None:
        self.check = check


class Text(str):
    """A kind of value that is not looked at."""

    __slots__ = ()


def _other(name: str) -> object:
    """Return what stands in for whatever else is imported: a kind of value, or a decorator."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Text if name[0].isupper() else lambda *_, **__: lambda method: method


def _pydantic() -> list[ModuleType]:
    numbers = {
        "NonNegativeFloat": float,
        "PositiveFloat": float,
        "NonNegativeInt": int,
        "PositiveInt": int,
    }
    return [
        _module(
            "pydantic",
            BaseModel=BaseModel,
            ConfigDict=dict,
            Field=Default,
            AfterValidator=AfterValidator,
            ValidationError=ValidationError,
            __getattr__=_other,
            **numbers,
        )
    ]


# ---------------------------------------------------------------- xxhash


class xxh3_64:
    """64 bits that depend on all bytes, not those of xxh3."""

    def __init__(self, data: Any = b"", seed: int = 0) -> None:
        self._hash = blake2b(data, digest_size=8, salt=seed.to_bytes(8, "little"))

    def update(self, data: Any) -> None:
        """Take more bytes."""
        self._hash.update(data)

    def intdigest(self) -> int:
        """Return them as a number."""
        return int.from_bytes(self._hash.digest(), "little")

    def digest(self) -> bytes:
        """Return them as bytes."""
        return self._hash.digest()


def _xxhash() -> list[ModuleType]:
    def xxh3_64_intdigest(data: Any, seed: int = 0) -> int:
        return xxh3_64(data, seed).intdigest()

    return [_module("xxhash", xxh3_64=xxh3_64, xxh3_64_intdigest=xxh3_64_intdigest)]


# ---------------------------------------------------------------- rich


class Nothing:
    """Something that takes every call and does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> "Nothing":
        return Nothing()

    def __call__(self, *_: object, **__: object) -> "Nothing":
        return Nothing()


def _rich() -> list[ModuleType]:
    return [_module("rich"), _module("rich.console", Console=Nothing)]


# ---------------------------------------------------------------- zstandard


def _zstandard() -> list[ModuleType]:
    kinds = dict.fromkeys(("ZstdCompressor", "ZstdDecompressor"), Nothing)
    return [_module("zstandard", ZstdError=ValueError, **kinds)]
