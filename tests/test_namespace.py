"""Identity: what must be equal for pages to be interchangeable."""

import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache import keys
from hicache.errors import ConfigError, InputError
from hicache.framing import frame, unframe
from hicache.layout import KVLayout
from hicache.namespace import Namespace, Shard, canonical_config, weights_fingerprint

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_size=16)
BASE = Namespace(model_config='{"model_type":"llama"}', weights=b"w" * 32, layout=LAYOUT)

# One change each; every field of Namespace, Shard and KVLayout is among them.
CHANGED: Mapping[str, Namespace] = {
    "format_version": replace(BASE, format_version=2),
    "model_config": replace(BASE, model_config='{"model_type":"qwen3"}'),
    "weights": replace(BASE, weights=b"v" * 32),
    "scale_format": replace(BASE, scale_format="per_page"),
    "lora": replace(BASE, lora=b"adapter"),
    "lora, empty": replace(BASE, lora=b""),
    "salt": BASE.salted("tenant b"),
    "salt, empty": BASE.salted(""),
    "layout.num_layers": replace(BASE, layout=replace(LAYOUT, num_layers=2)),
    "layout.num_kv_heads": replace(BASE, layout=replace(LAYOUT, num_kv_heads=4)),
    "layout.head_dim": replace(BASE, layout=replace(LAYOUT, head_dim=128)),
    "layout.dtype": replace(BASE, layout=replace(LAYOUT, dtype="float16")),
    "layout.page_size": replace(BASE, layout=replace(LAYOUT, page_size=32)),
    "layout.kind": replace(BASE, layout=replace(LAYOUT, kind="mla", num_kv_heads=1)),
    "shard.tp_size": replace(BASE, shard=Shard(tp_size=2)),
    "shard.tp_rank": replace(BASE, shard=Shard(tp_rank=1, tp_size=2)),
    "shard.pp_size": replace(BASE, shard=Shard(pp_size=2)),
    "shard.pp_rank": replace(BASE, shard=Shard(pp_rank=1, pp_size=2)),
}


def test_every_field_is_among_the_changes() -> None:
    names = {
        *(field.name for field in fields(Namespace) if field.name not in ("layout", "shard")),
        *(f"layout.{field.name}" for field in fields(KVLayout)),
        *(f"shard.{field.name}" for field in fields(Shard)),
    }

    assert names == {name.partition(",")[0] for name in CHANGED}


def test_any_one_field_changed_is_another_namespace() -> None:
    digests = {namespace.digest for namespace in [BASE, *CHANGED.values()]}

    assert len(digests) == 1 + len(CHANGED)


@pytest.mark.parametrize("name", CHANGED)
def test_no_page_key_is_shared_with_a_changed_namespace(name: str) -> None:
    tokens = keys.pack(range(64))

    these = keys.chain(BASE.digest, tokens, 64)
    others = keys.chain(CHANGED[name].digest, tokens, 64)

    assert not set(these) & set(others)


def test_pages_of_equal_size_but_other_dtype_are_not_interchangeable() -> None:
    """bfloat16 heads of 64 and float8 heads of 128 have as many bytes a page."""
    other = replace(LAYOUT, dtype="float8_e4m3fn", head_dim=128)

    assert other.page_nbytes == LAYOUT.page_nbytes
    assert replace(BASE, layout=other).digest != BASE.digest


def test_pages_of_equal_size_but_other_layout_are_not_interchangeable() -> None:
    other = replace(LAYOUT, num_kv_heads=64, head_dim=2)

    assert other.page_nbytes == LAYOUT.page_nbytes
    assert replace(BASE, layout=other).digest != BASE.digest


def test_fields_that_join_alike_are_not_one_namespace() -> None:
    one = replace(BASE, model_config="a", weights=b"bc")
    other = replace(BASE, model_config="ab", weights=b"c")

    assert one.digest != other.digest


def test_models_whose_names_join_alike_are_not_one_namespace() -> None:
    one = replace(BASE, model_config=canonical_config({"org": "org", "name": "a-b"}))
    other = replace(BASE, model_config=canonical_config({"org": "org-a", "name": "b"}))

    assert one.digest != other.digest


def test_a_tenant_hits_neither_what_has_no_salt_nor_another_tenant() -> None:
    tenants = [BASE, BASE.salted(""), BASE.salted("a"), BASE.salted("b")]

    assert all(one.digest != other.digest for one, other in combinations(tenants, 2))
    assert BASE.salted("a").salted(None) == BASE
    assert BASE.salted("a").digest == BASE.salted("a").digest


def test_a_salt_is_not_written_down() -> None:
    assert b"hunter2" not in BASE.salted("hunter2").descriptor
    with pytest.raises(ConfigError, match="salted"):
        replace(BASE, salt=b"hunter2")


def test_the_digest_is_the_hash_of_the_description() -> None:
    assert sha256(BASE.descriptor).digest() == BASE.digest


def test_the_digest_is_what_it_has_always_been() -> None:
    """Stored pages are found by it: it may change only with ``FORMAT_VERSION``."""
    assert BASE.digest.hex()[:16] == "c88ce8f292f76680"


@pytest.mark.parametrize("namespace", [BASE, *CHANGED.values()])
def test_a_namespace_can_be_read_from_its_description(namespace: Namespace) -> None:
    assert Namespace.decode(namespace.descriptor) == namespace


@given(
    st.text(), st.binary(), st.text(), st.none() | st.binary(), st.none() | st.text(), st.integers()
)
def test_any_namespace_can_be_read_from_its_description(
    config: str, weights: bytes, scales: str, lora: bytes | None, salt: str | None, version: int
) -> None:
    namespace = Namespace(
        config, weights, LAYOUT, scales, lora=lora, format_version=version
    ).salted(salt)

    assert Namespace.decode(namespace.descriptor) == namespace


@given(st.binary(max_size=100))
def test_any_other_bytes_are_refused(descriptor: bytes) -> None:
    with pytest.raises(InputError):
        Namespace.decode(descriptor)


@pytest.mark.parametrize(
    ("number", "field"),
    [
        (0, b"hicache"),
        (1, b"01"),
        (1, b"one"),
        (2, b"\xff"),
        (4, b"no layout"),
        (6, b"9"),
        (10, b"not framed"),
        (11, frame([b"salt", b"twice"])),
        (11, frame([b"no digest"])),
    ],
)
def test_a_description_has_one_form_only(number: int, field: bytes) -> None:
    parts = unframe(BASE.descriptor)
    parts[number] = field

    with pytest.raises(InputError):
        Namespace.decode(frame(parts))


def test_a_longer_description_is_refused() -> None:
    with pytest.raises(InputError):
        Namespace.decode(BASE.descriptor + frame([b"more"]))


def test_a_rank_is_below_its_size() -> None:
    with pytest.raises(ConfigError, match="rank"):
        Shard(tp_rank=2, tp_size=2)


def test_a_config_is_the_same_wherever_it_was_found() -> None:
    one = {"hidden_size": 8, "_name_or_path": "/a", "transformers_version": "5.0"}
    other = {"_name_or_path": "/b", "hidden_size": 8}

    assert canonical_config(one) == canonical_config(other)
    assert canonical_config(one) != canonical_config({"hidden_size": 9})


# ---------------------------------------------------------------- weights


def write_weights(path: Path, tensors: Mapping[str, bytes], note: str = "") -> None:
    """Write a safetensors file of uint8 tensors."""
    header: dict[str, object] = {"__metadata__": {"note": note}}
    start = 0
    for name, data in tensors.items():
        end = start + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_weights(tmp_path / "model-1.safetensors", {"a": bytes(10_000), "b": bytes(5)})
    write_weights(tmp_path / "model-2.safetensors", {"c": b"\1" * 2_000, "empty": b""})
    return tmp_path


def test_equal_weights_have_equal_fingerprints_anywhere(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.glob("*.safetensors"):
        (copy / path.name).write_bytes(path.read_bytes())

    assert weights_fingerprint(model) == weights_fingerprint(copy)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": b"\1" * 10_000, "b": bytes(5)},
        {"a": bytes(10_000), "b": b"\0\0\0\0\1"},
        {"a": bytes(9_999), "b": bytes(6)},
        {"x": bytes(10_000), "b": bytes(5)},
        {"a": bytes(9_999) + b"\1", "b": bytes(5)},
        {"a": bytes(10_001), "b": bytes(5)},
    ],
)
def test_other_weights_at_the_same_path_are_other_weights(
    model: Path, tensors: Mapping[str, bytes]
) -> None:
    before = weights_fingerprint(model)

    path = model / "model-1.safetensors"
    stat = path.stat()
    write_weights(path, tensors)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))

    assert weights_fingerprint(model) != before


def test_a_file_more_fewer_or_of_another_name_is_other_weights(model: Path) -> None:
    before = weights_fingerprint(model)

    (model / "model-2.safetensors").rename(model / "model-3.safetensors")
    renamed = weights_fingerprint(model)
    (model / "model-3.safetensors").unlink()
    fewer = weights_fingerprint(model)

    assert len({before, renamed, fewer}) == 3


def test_a_file_that_has_not_changed_is_not_read_again(model: Path) -> None:
    before = weights_fingerprint(model)
    path = model / "model-1.safetensors"
    stat = path.stat()

    path.write_bytes(bytes(stat.st_size))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert weights_fingerprint(model) == before


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no \*\.safetensors"):
        weights_fingerprint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(64),
        (1 << 60).to_bytes(8, "little") + bytes(64),
        (4).to_bytes(8, "little") + b"{{{{",
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b'{"a":{}}',
    ],
)
def test_a_file_that_is_no_safetensors_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(InputError, match=r"model\.safetensors"):
        weights_fingerprint(tmp_path)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")

    with pytest.raises(InputError, match="No such file"):
        weights_fingerprint(tmp_path)
