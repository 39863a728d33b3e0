"""``hicache chat`` against a real server."""

import io
from collections.abc import Iterator

import pytest

from hicache.config import EngineConfig
from hicache.engine.engine import Engine
from hicache.engine.loading import load_model
from hicache.errors import InputError
from hicache.tools import chat, cli
from tests.engine.kit import make_engine, serving
from tests.engine.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    # A short context, for a random model seldom ends a text itself.
    directory = tiny_model_dir(tmp_path_factory.mktemp("model"))
    config = EngineConfig(model=str(directory), device="cpu", context_tokens=160)
    model = load_model(config)
    with make_engine(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[chat.ChatClient]:
    client = chat.ChatClient(url, system="Be brief.", max_tokens=12)
    yield client
    client.close()


def test_each_turn_sends_the_chat_so_far(client: chat.ChatClient, engine: Engine) -> None:
    first = "".join(client.ask("Hello"))
    assert client.last is not None
    one = client.last
    list(client.ask("And now?"))

    assert client.last is not None
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And now?"},
    ]
    assert client.last.prompt_tokens == len(engine.model.template.render(history))
    assert client.last.prompt_tokens > one.prompt_tokens
    assert one.first_token_s is not None


def test_a_new_chat_knows_only_the_system_prompt(client: chat.ChatClient) -> None:
    list(client.ask("Hello"))
    assert client.last is not None
    before = client.last.prompt_tokens

    client.clear()
    list(client.ask("Hello"))

    assert client.last.prompt_tokens == before


def test_a_failed_turn_is_no_part_of_the_chat(client: chat.ChatClient) -> None:
    with pytest.raises(InputError, match="the server answers 400: the prompt has"):
        list(client.ask("x" * 5000))

    list(client.ask("Hello"))
    assert client.last is not None
    assert client.last.prompt_tokens < 100


def test_a_session_on_the_terminal(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "Hello\n\n/new\nHello\n/what\n" + "x" * 5000 + "\n/quit\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))

    code = chat.run(url, None, None)

    out, err = capsys.readouterr()
    assert code == 0
    assert out.strip()
    assert err.count(" prompt tokens cached") == 2
    assert "a new chat" in err
    assert err.count(chat.HELP) == 2
    assert "hicache: the server answers 400" in err


def test_flags_say_how_long_an_answer_is_and_how_it_is_sampled(
    url: str,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["chat", "--url", url, "--max-tokens", "5", "--temperature", "0"]
    answers = set()
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        num_tokens = engine.counters.num_output_tokens

        assert cli.main(argv) == 0

        assert engine.counters.num_output_tokens - num_tokens <= 5
        answers.add(capsys.readouterr().out)
    assert len(answers) == 1


def test_the_end_of_input_ends_a_session(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))

    assert chat.run(url, None, None) == 0


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "no url", "http://[", "ftp://a"])
def test_no_server_is_one_line(address: str) -> None:
    with pytest.raises(InputError) as raised:
        chat.ChatClient(address)

    assert str(raised.value).startswith(address)
    assert "\n" not in str(raised.value)


def test_a_model_that_the_server_lacks_is_said(url: str) -> None:
    client = chat.ChatClient(url, model="other")

    with pytest.raises(InputError, match="404: the model 'other' does not exist"):
        list(client.ask("Hello"))
    client.close()


def test_a_turn_says_where_its_tokens_came_from() -> None:
    turn = chat.Turn(0.123, 200, 150, {"device": 100, "host": 0, "storage": 50})

    assert str(turn) == (
        "150 of 200 prompt tokens cached (device 100, storage 50), first token after 0.12 s"
    )
