"""``hicache demo`` on a tiny model: its three acts, its file, and what makes it fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from hicache.actions import HitTokens
from hicache.errors import HiCacheError, InputError
from hicache.tools import cli, demo
from hicache.tools.demo_results import Results, Turn
from tests.engine.tiny_models import tiny_model_dir

SIZES = {"cache.device.size": "80p", "cache.host.size": "42p"}
"""The tiny model has a token a letter, and so prompts that are longer."""

SIZES_WITHOUT_NEED_OF_L3 = {"cache.device.size": "80p", "cache.host.size": "2000p"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a small model with room for the demo's prompts.

    Not of the tiniest: nothing is read from disk that is sooner computed.
    """
    folder = tmp_path_factory.mktemp("model")
    wider = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    return str(tiny_model_dir(folder, "llama", max_position_embeddings=4096, **wider))


def turn(**changes: Any) -> Turn:
    """Return a turn as it should be."""
    known: dict[str, Any] = {
        "chat": "Ana",
        "question": "What?",
        "answer": "That.",
        "prompt_ids": [1, 2, 3, 4],
        "token_ids": [5, 6],
        "hit": HitTokens(1, 1, 1),
        "ttft_s": 0.1,
        "computed_token_ids": [5, 6],
        "computed_ttft_s": 0.4,
    }
    return Turn(**{**known, **changes})


@pytest.mark.slow
def test_hits_come_from_every_tier_and_after_a_restart_from_disk(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, store = tmp_path / "demo.json", tmp_path / "store"

    code = demo.run(path, keep=store, settings={**SIZES, "engine.model": model})

    assert code == 0
    written = json.loads(path.read_text())
    assert written.keys() == {
        "equal", "turns", "prompt_tokens", "hit_tokens", "after_restart", "ttft_s", "speedup",
    }  # fmt: skip
    assert written["equal"] is True
    assert written["turns"] == 9
    assert written["hit_tokens"].keys() == {"device", "host", "storage"}
    assert min(written["hit_tokens"].values()) > 0
    assert sum(written["hit_tokens"].values()) < written["prompt_tokens"]
    assert written["after_restart"].keys() == {"prompt_tokens", "hit_tokens"}
    assert written["after_restart"]["hit_tokens"]["storage"] > 0
    assert written["ttft_s"].keys() == {"cached_p50", "computed_p50"}
    assert any(store.iterdir())
    assert "All 13 answers are the same, token by token." in capfd.readouterr().out


@pytest.mark.slow
def test_a_tier_that_was_never_hit_is_a_failure(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(settings={**SIZES_WITHOUT_NEED_OF_L3, "engine.model": model}) == 1

    assert "no prompt token came from L3, storage" in capfd.readouterr().out


@pytest.mark.slow
def test_what_the_model_cannot_be_loaded_for_is_told_in_one_line(tmp_path: Path) -> None:
    absent = tmp_path / "absent"

    with pytest.raises(HiCacheError, match=f"^engine.model: {absent}: no such directory"):
        demo.run(settings={"engine.model": str(absent)})


def test_turns_as_they_should_be_are_no_problem() -> None:
    results = Results([turn(), turn(is_after_restart=True)])

    assert results.problems() == []
    assert results.speedup == pytest.approx(4)


def test_a_token_that_differs_is_a_problem() -> None:
    results = Results([turn(computed_token_ids=[5, 7])])

    assert results.problems() == ["Ana: What? The answer is another without the cache"]
    assert results.as_json()["equal"] is False


def test_a_chat_that_finds_nothing_on_disk_after_the_restart_is_a_problem() -> None:
    results = Results([turn(), turn(is_after_restart=True, hit=HitTokens(2, 0, 0))])

    assert results.problems() == ["Ana: nothing was found on disk after the restart"]


def test_only_an_empty_directory_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()

    with pytest.raises(InputError, match="in an empty directory only"):
        demo.run(keep=tmp_path)
    assert cli.main(["demo", "--keep", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
