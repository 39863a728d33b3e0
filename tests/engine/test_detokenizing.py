"""What is said token by token is the text of all tokens, and never half a character."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hicache.engine.detokenizing import BROKEN, Detokenizer
from tests.engine.tiny_models import tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()

TEXTS = (
    "The capital of France is Paris.",
    "  two spaces, a\ttab,\n\nand lines \n",
    "日本語のテキスト、中文\uff0c한국어",
    "👍🏽 👩\u200d👩\u200d👧\u200d👦 🇫🇷 café naïve — “quotes” €",
    "\u0301combining first, and a\N{REPLACEMENT CHARACTER}replacement",
    "\U0001d518\U0001d52b ﷽ \u200b\ufeff end",
)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2's: words begin with ▁, and other characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁Hello", "▁world", "Hello", "world", "▁▁", "é", "日", "!", "▁a", "b"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer: Any = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    make: Any = PreTrainedTokenizerFast
    made = make(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    assert isinstance(made, PreTrainedTokenizerFast)
    return made


PIECES = sentencepiece_like()


def piece_ids(*pieces: str) -> list[int]:
    """Return tokens: pieces of the vocabulary, or the bytes of anything else."""
    vocabulary = PIECES.get_vocab()
    found: list[int] = []
    for piece in pieces:
        if piece in vocabulary:
            found.append(vocabulary[piece])
        else:
            found.extend(vocabulary[f"<0x{byte:02X}>"] for byte in piece.encode())
    return found


def deltas(
    tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], prompt: Sequence[int] = ()
) -> list[str]:
    """Return what every token says, and what is said at the end."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.end()]


def decode(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("text", TEXTS)
def test_the_parts_make_the_whole(text: str) -> None:
    said = deltas(BYTE_LEVEL, BYTE_LEVEL.encode(text))

    assert "".join(said) == text
    assert all(BROKEN not in part for part in said) or BROKEN in text


@given(st.text(max_size=40))
def test_the_parts_of_any_text_make_the_whole(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text)

    said = deltas(BYTE_LEVEL, tokens)

    assert "".join(said) == decode(BYTE_LEVEL, tokens) == text
    assert all(BROKEN not in part for part in said) or BROKEN in text


@given(st.lists(st.sampled_from(["▁Hello", "▁world", "world", "▁", "é", "😀", "日", "語", "▁a"])))
def test_spaces_between_words_are_right_where_tokens_carry_them(pieces: list[str]) -> None:
    tokens = piece_ids(*pieces)

    said = deltas(PIECES, tokens)

    assert "".join(said) == decode(PIECES, tokens)
    assert all(BROKEN not in part for part in said)


def test_the_first_word_keeps_its_space_behind_a_prompt_of_plain_text() -> None:
    prompt = piece_ids("▁Hello", "world")

    assert "".join(deltas(PIECES, piece_ids("▁world", "!"), prompt)) == " world!"


def test_the_first_word_has_no_space_at_the_start_or_behind_a_special_token() -> None:
    prompt = piece_ids("▁Hello", "</s>")

    assert "".join(deltas(PIECES, piece_ids("▁world", "!"))) == "world!"
    assert "".join(deltas(PIECES, piece_ids("▁world", "!"), prompt)) == "world!"


def test_special_tokens_between_words_do_not_take_their_space() -> None:
    tokens = piece_ids("▁Hello", *["</s>"] * 20, "▁world")

    assert "".join(deltas(PIECES, tokens)) == decode(PIECES, tokens) == "Hello world"


def test_a_character_is_said_with_its_last_byte() -> None:
    tokens = piece_ids("▁a", "😀", "b")

    assert deltas(PIECES, tokens) == ["a", "", "", "", "😀", "b", ""]


def test_special_tokens_have_no_text() -> None:
    end = BYTE_LEVEL.eos_token_id
    assert isinstance(end, int)

    assert deltas(BYTE_LEVEL, [end, *BYTE_LEVEL.encode("a"), end, end]) == ["", "a", "", "", ""]


def test_half_a_character_at_the_end_is_said_as_broken() -> None:
    tokens = BYTE_LEVEL.encode("x😀")[:-1]

    said = deltas(BYTE_LEVEL, tokens)

    assert "".join(said) == decode(BYTE_LEVEL, tokens)
    assert said[-1] == BROKEN


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60))
def test_tokens_that_are_no_text_are_said_all_the_same(token_ids: list[int]) -> None:
    said = deltas(BYTE_LEVEL, token_ids)

    # Where no character begins, the number of signs for broken bytes may differ.
    assert "".join(said).replace(BROKEN, "") == decode(BYTE_LEVEL, token_ids).replace(BROKEN, "")


def test_a_long_run_of_broken_bytes_is_not_held_for_ever() -> None:
    continuation = BYTE_LEVEL.encode("é")[-1:] if len(BYTE_LEVEL.encode("é")) > 1 else []
    assert continuation

    said = deltas(BYTE_LEVEL, continuation * 100)

    assert any(said[:20])
    assert "".join(said).count(BROKEN) == 100


class CountingTokenizer:
    """A tokenizer that counts the tokens it was given to decode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.all_special_ids = tokenizer.all_special_ids
        self.num_decoded = 0

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.num_decoded += len(token_ids)
        return decode(self._tokenizer, token_ids)


@pytest.mark.parametrize(
    "tokens",
    [
        BYTE_LEVEL.encode("The quick brown fox 日本 ") * 100,
        [BYTE_LEVEL.eos_token_id] * 2000,
        BYTE_LEVEL.encode("é")[-1:] * 2000,
        BYTE_LEVEL.encode("é")[:1] * 2000,
    ],
    ids=["text", "special tokens", "broken bytes", "beginnings of characters"],
)
def test_the_cost_of_a_token_does_not_grow_with_the_text(tokens: list[int]) -> None:
    counting: Any = CountingTokenizer(BYTE_LEVEL)
    detokenizer = Detokenizer(counting)

    for token_id in tokens:
        detokenizer.push(token_id)

    assert counting.num_decoded <= 50 * len(tokens)
