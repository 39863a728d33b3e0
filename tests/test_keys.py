"""Page keys and packed tokens."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache import keys

TOKENS = st.integers(min_value=0, max_value=2**31 - 1)


def test_tokens_are_packed_as_little_endian_int32() -> None:
    assert keys.pack([1, 258, 2**31 - 1]) == bytes.fromhex("01000000 02010000 ffffff7f")


@given(st.lists(TOKENS))
def test_packed_tokens_can_be_read_again(token_ids: list[int]) -> None:
    assert keys.unpack(keys.pack(token_ids)) == token_ids


@pytest.mark.parametrize("token_id", [2**31, -(2**31) - 1])
def test_a_token_that_does_not_fit_is_an_error(token_id: int) -> None:
    with pytest.raises(OverflowError):
        keys.pack([token_id])


def test_the_first_keys_of_a_chain_are_what_they_have_always_been() -> None:
    """Stored pages are found by these: they must never change."""
    found = keys.chain(bytes(32), keys.pack(range(4)), 8)

    first = sha256(bytes(32) + bytes.fromhex("00000000 01000000")).digest()
    second = sha256(first + bytes.fromhex("02000000 03000000")).digest()
    assert found == [first, second]
    assert first.hex().startswith("4aefeea7")


def test_no_tokens_have_no_keys() -> None:
    assert keys.chain(bytes(32), b"", 64) == []


def test_a_part_of_a_page_has_no_key() -> None:
    with pytest.raises(AssertionError):
        keys.chain(bytes(32), keys.pack([1, 2, 3]), 8)


@given(st.lists(TOKENS, min_size=1, max_size=24), st.data())
def test_a_chain_continues_from_any_page(token_ids: list[int], data: st.DataObject) -> None:
    tokens = keys.pack(token_ids)
    cut = data.draw(st.integers(0, len(token_ids))) * keys.TOKEN_NBYTES

    whole = keys.chain(bytes(32), tokens, keys.TOKEN_NBYTES)
    head = keys.chain(bytes(32), tokens[:cut], keys.TOKEN_NBYTES)
    tail = keys.chain(head[-1] if head else bytes(32), tokens[cut:], keys.TOKEN_NBYTES)

    assert head + tail == whole


@given(st.lists(TOKENS, min_size=2, max_size=24), st.data())
def test_another_token_changes_its_key_and_all_behind(
    token_ids: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(token_ids) - 1))
    other_ids = list(token_ids)
    other_ids[place] = data.draw(TOKENS.filter(lambda token: token != token_ids[place]))

    these = keys.chain(bytes(32), keys.pack(token_ids), keys.TOKEN_NBYTES)
    others = keys.chain(bytes(32), keys.pack(other_ids), keys.TOKEN_NBYTES)

    equal = [this == other for this, other in zip(these, others, strict=True)]
    assert equal == [True] * place + [False] * (len(token_ids) - place)


def test_a_key_depends_on_the_namespace() -> None:
    tokens = keys.pack(range(16))

    assert keys.chain(bytes(32), tokens, 64) != keys.chain(b"\1" * 32, tokens, 64)


@given(st.binary(max_size=40), st.integers(0, 70))
def test_an_image_has_a_token_for_each_position(content: bytes, num_positions: int) -> None:
    tokens = keys.tokens_of_image(content, num_positions)

    assert len(tokens) == num_positions
    assert all(0 <= token < 2**31 for token in tokens)
    assert keys.unpack(keys.pack(tokens)) == tokens


def test_a_shorter_image_is_a_prefix_of_the_same_image() -> None:
    assert keys.tokens_of_image(b"cat", 100)[:9] == keys.tokens_of_image(b"cat", 9)


def test_other_images_differ_at_every_position() -> None:
    pairs = zip(keys.tokens_of_image(b"cat", 64), keys.tokens_of_image(b"dog", 64), strict=True)

    assert all(cat != dog for cat, dog in pairs)


def test_the_tokens_of_an_image_are_what_they_have_always_been() -> None:
    digest = sha256(b"x").digest()
    block = sha256(digest + bytes(8)).digest()

    assert keys.tokens_of_image(b"x", 1) == [int.from_bytes(block[:4], "little") & 0x7FFFFFFF]
