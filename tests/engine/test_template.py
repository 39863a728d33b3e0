"""Chats become the tokens that the model's own template says, or one line that says why not."""

import pytest

from hicache.engine.template import ChatTemplate
from hicache.errors import InputError
from tests.engine.tiny_models import tiny_tokenizer

QUESTION = {"role": "user", "content": "What is it?"}

TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n%s<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEEPING = TURNS.replace("%s", "{{ message.content }}") + "{# <think> #}"
DROPPING = TURNS.replace("%s", "{{ message.content.split('</think>')[-1].lstrip('\\n') }}")
OWN_FIELD = TURNS.replace(
    "%s",
    "{% if '<|channel|>analysis' in message.content %}{{ raise_exception('use thinking') }}"
    "{% endif %}{% if message.thinking and loop.last %}<|channel|>analysis{{ message.thinking }}"
    "{% endif %}{{ message.content }}",
)


def template(source: str | None = None) -> ChatTemplate:
    tokenizer = tiny_tokenizer()
    if source is not None:
        tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


def test_a_chat_becomes_the_tokens_of_its_rendered_text() -> None:
    chat = template()

    tokens = chat.render([QUESTION])

    text = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render_text([QUESTION]) == text
    assert tokens == tiny_tokenizer().encode(text, add_special_tokens=False)
    assert tokens[0] == tiny_tokenizer().convert_tokens_to_ids("<|im_start|>")


def test_the_generation_prompt_can_be_left_out() -> None:
    chat = template()

    without = chat.render([QUESTION], add_generation_prompt=False)

    assert chat.render([QUESTION])[: len(without)] == without
    assert len(chat.render([QUESTION])) > len(without)


def test_a_longer_chat_begins_with_the_tokens_of_the_shorter() -> None:
    chat = template()
    first = chat.render([QUESTION])

    longer = chat.render([QUESTION, {"role": "assistant", "content": "A page."}, QUESTION])

    assert longer[: len(first)] == first


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]

    assert template().render([{"role": "user", "content": parts}]) == template().render([QUESTION])


def test_tools_and_the_templates_own_variables_reach_it() -> None:
    chat = template("{{ tools[0].function.name }} {{ enable_thinking }}")
    tools = [{"type": "function", "function": {"name": "look_up"}}]

    text = chat.render_text([QUESTION], tools=tools, options={"enable_thinking": False})

    assert text == "look_up False"


@pytest.mark.parametrize(
    ("source", "messages", "options", "reason"),
    [
        ("", [QUESTION], {}, "has no chat template"),
        (None, [], {}, "there are none"),
        (None, [{"role": "user", "content": [{"type": "image_url"}]}], {}, "only text"),
        (None, [{"role": "user", "content": ["bare"]}], {}, "only text"),
        ("{{ raise_exception('roles\nmust alternate') }}", [QUESTION], {}, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", [QUESTION], {}, "refuses"),
        ("{% if %}", [QUESTION], {}, "refuses"),
        (None, [QUESTION], {"chat_template": "{{ 1 }}"}, "no variable of a chat template"),
        (None, [QUESTION], {"tokenize": True}, "no variable of a chat template"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_one_line(
    source: str | None, messages: list[dict[str, object]], options: dict[str, object], reason: str
) -> None:
    chat = template(source)

    with pytest.raises(InputError, match=reason) as caught:
        chat.render(messages, options=options)
    assert "\n" not in str(caught.value)


def test_what_a_template_leaves_undefined_is_empty() -> None:
    assert template().render_text([{"role": "user"}], add_generation_prompt=False) == (
        "<|im_start|>user\n<|im_end|>\n"
    )


@pytest.mark.parametrize("source", [None, "", KEEPING])
def test_templates_that_keep_a_whole_turn_drop_no_reasoning(source: str | None) -> None:
    chat = template(source)

    assert not chat.drops_reasoning
    assert chat.reasoning_ids == ()
    assert chat.dropped_from(tiny_tokenizer().encode("<think>hm</think>")) is None


@pytest.mark.parametrize(
    ("source", "opening"), [(DROPPING, "<think>"), (OWN_FIELD, "<|channel|>analysis")]
)
def test_templates_that_drop_reasoning_from_history_are_found_out(
    source: str, opening: str
) -> None:
    source = source + "{# <think> #}" if opening == "<think>" else source

    chat = template(source)

    assert chat.drops_reasoning
    assert chat.reasoning_ids == tuple(tiny_tokenizer().encode(opening, add_special_tokens=False))


def test_where_dropped_reasoning_begins_is_found_behind_any_start() -> None:
    chat = template(DROPPING + "{# <think> #}")
    encode = tiny_tokenizer().encode
    tokens = encode("Yes. ") + encode("<think>") + encode("hm") + encode("<think>")
    first = len(encode("Yes. "))
    second = len(tokens) - len(encode("<think>"))

    assert chat.dropped_from(tokens) == first
    assert chat.dropped_from(tokens, first) == first
    assert chat.dropped_from(tokens, first + 1) == second
    assert chat.dropped_from(tokens, second + 1) is None
    assert chat.dropped_from(tokens[: first + 2]) is None
