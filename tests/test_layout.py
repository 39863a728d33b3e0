"""The form of a page."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from hicache.errors import ConfigError, InputError
from hicache.framing import frame, unframe
from hicache.layout import ITEM_NBYTES, Kind, KVLayout

MHA = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", page_size=16)
MLA = KVLayout(27, 1, 576, "bfloat16", 64, kind="mla")


def test_a_page_has_key_and_value_of_every_layer() -> None:
    assert MHA.page_shape == (30, 2, 16, 3, 64)
    assert MHA.page_nbytes == 368_640
    assert MHA.token_nbytes == 23_040


def test_a_latent_page_has_one_vector_a_token() -> None:
    assert MLA.page_shape == (27, 64, 576)
    assert MLA.token_nbytes == 27 * 576 * 2


@pytest.mark.parametrize("dtype", ITEM_NBYTES)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_bytes_and_shape_agree(dtype: str, kind: Kind) -> None:
    layout = KVLayout(3, 1, 10, dtype, 4, kind)

    assert layout.page_nbytes == prod(layout.page_shape) * ITEM_NBYTES[dtype]
    assert layout.page_nbytes == layout.page_size * layout.token_nbytes


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"num_layers": 0}, "num_layers must be"),
        ({"num_kv_heads": -1}, "num_kv_heads must be"),
        ({"head_dim": 0}, "head_dim must be"),
        ({"page_size": 2**31}, "page_size must be"),
        ({"dtype": "int3"}, "'int3' is none of"),
        ({"kind": "gqa"}, "'gqa' is none of"),
        ({"kind": "mla"}, "one latent for all heads"),
    ],
)
def test_an_impossible_layout_is_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(MHA, **wrong)


@pytest.mark.parametrize("layout", [MHA, MLA])
def test_a_layout_can_be_read_from_its_description(layout: KVLayout) -> None:
    assert KVLayout.decode(layout.descriptor) == layout


@pytest.mark.parametrize(
    "descriptor",
    [
        b"",
        b"x",
        frame([b"num_layers"]),
        MHA.descriptor + frame([b"window", b"4096"]),
        MHA.descriptor.replace(b"bfloat16", b"bfloat61"),
        MHA.descriptor.replace(frame([b"page_size", b"16"]), frame([b"page_size", b"016"])),
        MHA.descriptor.replace(frame([b"page_size", b"16"]), frame([b"page_size", b"\xff"])),
    ],
)
def test_anything_else_is_no_description(descriptor: bytes) -> None:
    with pytest.raises(InputError):
        KVLayout.decode(descriptor)


def test_fingerprints_are_equal_for_equal_layouts_only() -> None:
    assert replace(MHA).fingerprint == MHA.fingerprint
    assert replace(MHA, page_size=32).fingerprint != MHA.fingerprint


def test_framed_fields_can_be_read_again() -> None:
    fields = [b"", b"a", b"", bytes(300)]

    assert unframe(frame(fields)) == fields


def test_a_cut_frame_is_an_error() -> None:
    whole = frame([b"abc", b"de"])

    for end in range(1, len(whole)):
        if end != len(frame([b"abc"])):
            with pytest.raises(InputError):
                unframe(whole[:end])
