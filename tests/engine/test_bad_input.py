"""What goes wrong from outside: one clear line each, and whoever can goes on serving.

Requests, settings, stores and disks, mostly against ``hicache serve`` as a process of its own.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hicache.engine.model import LoadedModel
from hicache.tools.cli import main
from tests.engine.kit import greedy_reference, prompt
from tests.engine.servers import Server, command, server

KINDS = ["lmdb", "file"]
PROMPT = prompt(60)
OTHER = prompt(60, seed=1)
WHOLE = 56
"""Tokens of either in whole pages: what storage gives back."""

# ---------------------------------------------------------------- it does not start


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Return the one line of a command that could not run; it may have begun to load a model."""
    code = main(arguments)

    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    *before, last = said.err.splitlines()
    assert all(line.startswith("loading ") for line in before)
    assert last.startswith("hicache: ")
    return last.removeprefix("hicache: ")


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, command(tmp_path / "nothing"))

    assert said == (
        f"engine.model: {tmp_path / 'nothing'}: no such directory (a local one with a HF model, "
        "or smollm2)"
    )


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, command(tmp_path))

    assert said == f"engine.model: {tmp_path}: there is no config.json in it"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[cache]\npage_sise = 16\n", "cache.page_sise: no such setting"),
        ("[cash]\n", "cash: no such setting"),
        ("[cache.host]\nsize = '8GBB'\n", None),
        ("[cache]\npage_size = 'many'\n", None),
        ("[cache\n", None),
    ],
)
def test_a_mistake_in_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str | None
) -> None:
    (tmp_path / "c.toml").write_text(text)

    said = refusal(capsys, ["serve", "--config", str(tmp_path / "c.toml")])

    place, _, what = said.partition(": ")
    assert place == str(tmp_path / "c.toml")
    assert expected is None or what == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_below_a_file(
    tmp_path: Path, llama: LoadedModel, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "store"

    said = refusal(
        capsys, command(llama.directory, cache__storage__backend=kind, cache__storage__path=path)
    )

    assert said == f"cache.storage.path: {path}: Not a directory"


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_where_nothing_can_be_made(
    llama: LoadedModel, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = Path("/proc/self/store")

    said = refusal(
        capsys, command(llama.directory, cache__storage__backend=kind, cache__storage__path=path)
    )

    assert said == f"cache.storage.path: {path}: No such file or directory"


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_another_kind(
    tmp_path: Path, llama: LoadedModel, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    other = {"lmdb": "file", "file": "lmdb"}[kind]
    (tmp_path / "hicache-store").write_text(f"hicache {other} 1\n")

    said = refusal(
        capsys,
        command(llama.directory, cache__storage__backend=kind, cache__storage__path=tmp_path),
    )

    assert said == f"cache.storage.path: {tmp_path}: holds a store of kind {other}, not {kind}"


def test_a_backend_that_cannot_be_opened(
    llama: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = "tests.engine.bad_backends:UnopenableBackend"

    said = refusal(capsys, command(llama.directory, cache__storage__backend=backend))

    assert said == "UnopenableBackend: PermissionError: [Errno 13] Permission denied"


# ---------------------------------------------------------------- requests


@pytest.fixture(scope="module")
def plain(llama: LoadedModel) -> Iterator[Server]:
    """A server without storage; no request changes it."""
    with server(llama.directory) as running:
        yield running


JSON = {"content-type": "application/json"}
BAD_REQUESTS: list[tuple[str, dict[str, Any], int, dict[str, object]]] = [
    (
        "/v1/completions",
        {"json": {"prompt": [3] * 1024}},
        400,
        {
            "message": "the prompt has 1024 tokens, and with one more it must fit into the context "
            "of 1024",
            "code": "context_length_exceeded",
        },
    ),
    (
        "/generate",
        {"json": {"input_ids": [3] * 500}},
        400,
        {"message": "the prompt has 500 tokens and L1 holds 320: raise cache.device.size"},
    ),
    (
        "/v1/completions",
        {"json": {"model": "gpt-5", "prompt": "a"}},
        404,
        {"param": "model", "code": "model_not_found"},
    ),
    (
        "/v1/chat/completions",
        {"content": b'{"messages": ', "headers": JSON},
        400,
        {"message": "the body is no JSON: Expecting value"},
    ),
    (
        "/v1/chat/completions",
        {"json": {"messages": "hello"}},
        400,
        {"message": "messages: Input should be a valid list", "param": "messages"},
    ),
    (
        "/v1/completions",
        {"json": {"prompt": "a", "max_tokens": "5"}},
        400,
        {"message": "max_tokens: Input should be a valid integer", "param": "max_tokens"},
    ),
    (
        "/generate",
        {"json": {"input_ids": ["a"]}},
        400,
        {"param": "input_ids"},
    ),
    (
        "/generate",
        {"json": {"input_ids": [10**6]}},
        400,
        {"message": "a token id is not from 0 to 319"},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "request_", "status", "expected"), BAD_REQUESTS)
def test_a_bad_request_is_told_so_and_the_next_one_is_answered(
    plain: Server,
    llama: LoadedModel,
    path: str,
    request_: Mapping[str, Any],
    status: int,
    expected: Mapping[str, object],
) -> None:
    response = plain.post(path, **request_)

    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert {name: error[name] for name in expected} == dict(expected)
    assert "\n" not in error["message"]
    assert plain.ask(PROMPT)[0] == greedy_reference(llama, PROMPT, 4)
    assert "Traceback" not in "\n".join(plain.lines)


# ---------------------------------------------------------------- storage


def check_that_it_serves(running: Server, model: LoadedModel) -> None:
    """Assert that prompts old and new are answered, as often as they are asked."""
    for ids in (PROMPT, OTHER, PROMPT):
        assert running.ask(ids)[0] == greedy_reference(model, ids, 4)


DETACHED = "WARNING hicache.store.conductor: storage is detached after failing again and again: "
BAD_BACKENDS = [
    ("RaisingBackend", DETACHED + "OSError(5, 'Input/output error')", 0),
    ("HangingBackend", DETACHED + "TimeoutError('no answer in time')", 1),
    (
        "BlockingBackend",
        "WARNING hicache.store.page_store: storage: BlockingBackend blocks its loop: until it "
        "goes on, all is missed",
        1,
    ),
    (
        "FullBackend",
        "WARNING hicache.store.conductor: storage has no room, so nothing is stored for now: "
        "no room",
        0,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line", "code"), BAD_BACKENDS)
def test_storage_that_does_nothing_right_costs_hits_only(
    llama: LoadedModel, name: str, line: str, code: int
) -> None:
    with server(
        llama.directory,
        cache__storage__backend=f"tests.engine.bad_backends:{name}",
        cache__storage__deadline_s=0.2,
        server__shutdown_s=4,
    ) as running:
        for seed in range(5):
            running.ask(prompt(300, seed + 10))
        check_that_it_serves(running, llama)
        ended = running.end()

    assert running.lines.count(line) == 1
    assert "Traceback" not in "\n".join(running.lines)
    # What has not been written down when calls hang is no success.
    assert ended == code
    assert (running.lines[-1] == "a call of storage hangs: ending without it") == (code == 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_another_version_is_begun_anew(
    tmp_path: Path, llama: LoadedModel, kind: str
) -> None:
    (tmp_path / "hicache-store").write_text(f"hicache {kind} 999\n")

    with server(
        llama.directory, cache__storage__backend=kind, cache__storage__path=tmp_path
    ) as running:
        check_that_it_serves(running, llama)
        running.flush()
        again = running.ask_until_hit(PROMPT)

    assert again == (greedy_reference(llama, PROMPT, 4), WHOLE)
    assert [line for line in running.lines if line.startswith(("WARNING", "ERROR"))] == [
        f"WARNING hicache.disk.directory: {tmp_path}: a store of another format "
        f"('hicache {kind} 999'): starting empty"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit_kib"), [("lmdb", 192), ("file", 4)])
def test_a_full_disk_costs_hits_only(
    tmp_path: Path, llama: LoadedModel, kind: str, limit_kib: int
) -> None:
    path = tmp_path / "store"
    store: dict[str, Any] = {"cache__storage__backend": kind, "cache__storage__path": path}
    with server(llama.directory, **store) as running:
        running.ask(PROMPT)
        running.flush()

    # No file may grow beyond this: no disk is full, but the system says so. What is there can
    # be read.
    with server(llama.directory, limit=f"ulimit -f {2 * limit_kib}", **store) as running:
        old = running.ask_until_hit(PROMPT)
        for seed in range(5):
            running.ask(prompt(300, seed + 10))
        running.flush()
        check_that_it_serves(running, llama)
        code = running.end()

    assert code == 0
    assert old == (greedy_reference(llama, PROMPT, 4), WHOLE)
    said = [line for line in running.lines if "no room" in line]
    assert said == [
        "WARNING hicache.store.conductor: storage has no room, so nothing is stored for now: "
        f"{path}: File too large"
    ]
    assert "Traceback" not in "\n".join(running.lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("lmdb", "lmdb: {path}: has been removed; opening it anew"),
        ("file", "file.store: {path}: has been removed; starting empty"),
    ],
)
def test_a_store_that_is_deleted_under_a_server_is_begun_anew(
    tmp_path: Path, llama: LoadedModel, kind: str, line: str
) -> None:
    path = tmp_path / "store"
    with server(
        llama.directory, cache__storage__backend=kind, cache__storage__path=path
    ) as running:
        running.ask(PROMPT)
        running.flush()
        shutil.rmtree(path)
        check_that_it_serves(running, llama)
        running.flush()
        running.ask(OTHER)
        running.flush()
        again = running.ask_until_hit(OTHER)
        code = running.end()

    assert code == 0
    assert again == (greedy_reference(llama, OTHER, 4), WHOLE)
    assert [line for line in running.lines if line.startswith(("WARNING", "ERROR"))] == [
        f"WARNING hicache.backends.{line.format(path=path)}"
    ]
    assert os.path.exists(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_servers_share_one_store(tmp_path: Path, llama: LoadedModel, kind: str) -> None:
    store: dict[str, Any] = {"cache__storage__backend": kind, "cache__storage__path": tmp_path}
    with ExitStack() as stack:
        one = stack.enter_context(server(llama.directory, **store))
        two = stack.enter_context(server(llama.directory, **store))
        for writer, reader, ids in ((one, two, PROMPT), (two, one, OTHER)):
            writer.ask(ids)
            writer.flush()
            assert reader.ask_until_hit(ids) == (greedy_reference(llama, ids, 4), WHOLE)
        codes = [one.end(), two.end()]

    assert codes == [0, 0]
    for running in (one, two):
        assert not [line for line in running.lines if line.startswith(("WARNING", "ERROR"))]
