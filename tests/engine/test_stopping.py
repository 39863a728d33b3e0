"""A text ends where it was asked to, and nothing behind its end is ever said."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hicache.engine.detokenizing import Detokenizer
from hicache.engine.outputs import Output, SamplingParams
from hicache.engine.stopping import Answer
from tests.engine.tiny_models import VOCABULARY, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = 2
PLAIN = SamplingParams(max_tokens=1000)


def write(token_ids: Sequence[int], params: SamplingParams) -> list[Output]:
    """Return the outputs of an answer, up to the last."""
    answer = Answer(Detokenizer(TOKENIZER), params, {EOS})
    outputs: list[Output] = []
    for token_id in token_ids:
        outputs.append(answer.push(token_id))
        if outputs[-1].finish_reason is not None:
            break
    return outputs


def text(outputs: Sequence[Output]) -> str:
    return "".join(output.text for output in outputs)


def ids(of: str) -> list[int]:
    encoded: list[int] = TOKENIZER.encode(of)
    return encoded


def test_without_an_end_every_token_says_its_text_at_once() -> None:
    outputs = write(ids("Paris is it."), PLAIN)

    assert text(outputs) == "Paris is it."
    assert all(output.text and output.finish_reason is None for output in outputs)


def test_the_end_of_text_ends_it_and_has_no_text() -> None:
    outputs = write([*ids("Paris"), EOS, *ids("more")], PLAIN)

    assert text(outputs) == "Paris"
    assert outputs[-1] == Output("", (EOS,), "stop", EOS)


def test_the_end_of_text_can_be_ignored() -> None:
    outputs = write([*ids("a"), EOS, *ids("b")], replace(PLAIN, ignore_eos=True))

    assert text(outputs) == "ab"
    assert outputs[-1].finish_reason is None


def test_a_stop_token_ends_it_even_where_the_end_of_text_is_ignored() -> None:
    stop = ids(".")[0]
    params = replace(PLAIN, ignore_eos=True, stop_token_ids=(stop,))

    outputs = write([*ids("Yes"), EOS, stop, *ids("No")], params)

    assert text(outputs) == "Yes"
    assert outputs[-1] == Output("", (stop,), "stop", stop)


def test_max_tokens_ends_it_with_the_last_tokens_text() -> None:
    tokens = ids("The quick brown fox")

    outputs = write(tokens, replace(PLAIN, max_tokens=3))

    assert [output.token_ids for output in outputs] == [(token,) for token in tokens[:3]]
    assert text(outputs) == TOKENIZER.decode(tokens[:3])
    assert [output.finish_reason for output in outputs] == [None, None, "length"]


def test_a_stop_string_is_cut_off_though_it_spans_tokens() -> None:
    tokens = ids("one two STOP three")

    outputs = write(tokens, replace(PLAIN, stop=("STOP",)))

    assert text(outputs) == "one two "
    assert (outputs[-1].finish_reason, outputs[-1].stop_match) == ("stop", "STOP")
    assert len(outputs) < len(tokens)


def test_what_turns_out_to_be_no_stop_string_is_said_after_all() -> None:
    outputs = write(ids("a STO b STOOP c"), replace(PLAIN, stop=("STOP",)))
    end = Answer(Detokenizer(TOKENIZER), PLAIN, ())

    assert text(outputs) == "a STO b STOOP c"
    assert end.end("abort").text == ""


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    answer = Answer(Detokenizer(TOKENIZER), replace(PLAIN, stop=("\n\nQ",)), ())
    newline = ids("\n")[0]

    said = [answer.push(token).text for token in [*ids("x"), newline, newline]]

    assert said == ["x", "", ""]
    assert answer.push(newline).text == "\n"
    assert answer.push(ids("Q")[0]) == Output("", (ids("Q")[0],), "stop", "\n\nQ")


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_was_held_back_is_said_at_the_end(reason: str) -> None:
    answer = Answer(Detokenizer(TOKENIZER), replace(PLAIN, stop=("STOP",)), ())
    said = "".join(answer.push(token).text for token in ids("go STO"))

    last = answer.end("abort") if reason == "abort" else answer.end("error", "a reason")

    assert said + last.text == "go STO"
    assert (last.token_ids, last.finish_reason) == ((), reason)
    assert last.error == (None if reason == "abort" else "a reason")


def test_what_was_held_back_is_said_at_the_length_limit_and_at_the_end_of_text() -> None:
    params = replace(PLAIN, stop=("STOP",))
    tokens = ids("go STO")

    assert text(write(tokens, replace(params, max_tokens=len(tokens)))) == "go STO"
    assert text(write([*tokens, EOS], params)) == "go STO"


def test_a_stop_string_at_the_length_limit_goes_before_the_limit() -> None:
    tokens = ids("go STOP")

    outputs = write(tokens, replace(PLAIN, stop=("STOP",), max_tokens=len(tokens)))

    assert text(outputs) == "go "
    assert (outputs[-1].finish_reason, outputs[-1].stop_match) == ("stop", "STOP")


def test_the_stop_string_that_begins_first_wins_and_of_those_the_longest() -> None:
    outputs = write(ids("abcdef"), replace(PLAIN, stop=("cd", "bc", "bcd")))

    assert text(outputs) == "a"
    assert outputs[-1].stop_match in ("bc", "bcd")


def test_of_stop_strings_that_begin_in_one_token_the_longest_is_reported() -> None:
    word = next(token for token in range(3, VOCABULARY) if len(TOKENIZER.decode([token])) > 3)
    text_of_it = TOKENIZER.decode([word])
    assert isinstance(text_of_it, str)

    (output,) = write([word], replace(PLAIN, stop=(text_of_it[:2], text_of_it[:3])))

    assert (output.text, output.stop_match) == ("", text_of_it[:3])


def test_an_empty_stop_string_stops_nothing() -> None:
    assert text(write(ids("abc"), replace(PLAIN, stop=("",)))) == "abc"


def test_logits_that_are_no_numbers_end_the_text_with_an_error() -> None:
    answer = Answer(Detokenizer(TOKENIZER), PLAIN, ())

    output = answer.push(-1)

    assert (output.finish_reason, output.token_ids) == ("error", ())
    assert output.error is not None
    assert "logits" in output.error


def test_however_a_text_is_cut_into_tokens_it_ends_at_its_first_stop_string() -> None:
    rng = random.Random(1)
    stops = ("ab", "bba", "\N{EURO SIGN}b")
    for _ in range(300):
        whole = "".join(rng.choices("ab\N{EURO SIGN}", weights=(4, 4, 2), k=rng.randrange(1, 12)))
        tokens = [token for character in whole for token in ids(character)]

        answer = Answer(Detokenizer(TOKENIZER), replace(PLAIN, stop=stops), ())
        said, match = "", None
        for token in tokens:
            output = answer.push(token)
            said, match = said + output.text, output.stop_match
            if match is not None:
                break
        else:
            said += answer.end("abort").text

        # What a reader of the growing text would have cut, seeing one character at a time.
        expected, expected_match = whole, None
        for end in range(1, len(whole) + 1):
            seen = [(whole.find(stop, 0, end), stop) for stop in stops if stop in whole[:end]]
            if seen:
                at, expected_match = min(seen, key=lambda item: (item[0], -len(item[1])))
                expected = whole[:at]
                break
        assert (said, match) == (expected, expected_match)
