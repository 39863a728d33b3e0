"""Our use of FlashInfer, with a stand-in for it that computes in torch from what it is told."""

import ast
import importlib.util
import inspect
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hicache.engine.attention import Span, Traits, never_wait
from hicache.engine.attention_choice import choose_attention, why_not_flashinfer
from hicache.engine.attention_flashinfer import FlashInferBackend, Group
from hicache.engine.graphs import Replay, batch_sizes
from hicache.engine.model import LoadedModel
from hicache.engine.paged import TorchBackend
from hicache.engine.runner import Batch, ModelRunner, SequenceSlice
from tests.engine import fake_flashinfer
from tests.engine.fake_flashinfer import FakeFlashInfer
from tests.engine.paged_runs import Pages, own_continuation
from tests.engine.tiny_models import LAYERS, VOCABULARY, load_own, tiny_model

KINDS = ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss")
NUM_GROUPS = {"llama": 1, "mistral": 1, "gemma2": 2, "gemma3_text": 2, "gpt_oss": 2}
PROMPT = random.Random(4).choices(range(3, VOCABULARY), k=45)
CUTS = {"one piece": (0, 45), "chunks": (0, 7, 8, 24, 44, 45)}
NUM_NEW = 6
WORKSPACE = 1 << 10


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    directory = tmp_path_factory.mktemp("models")
    return {kind: tiny_model(directory, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def expected(models: dict[str, LoadedModel]) -> dict[str, tuple[list[int], Tensor]]:
    """What HF's own attention and cache say."""
    return {
        kind: own_continuation(load_own(models[kind]), PROMPT, (0, 45), NUM_NEW) for kind in KINDS
    }


class FlashPages(Pages):
    """A pool whose runner attends by the stand-in."""

    def __init__(self, loaded: LoadedModel, seed: int = 0) -> None:
        super().__init__(loaded, seed=seed)
        self.library = FakeFlashInfer()
        backend = FlashInferBackend(self.pool, loaded.dtype, self.library, WORKSPACE)
        self.runner = ModelRunner(loaded, self.pool, backend)

    @property
    def log(self) -> fake_flashinfer.Log:
        return self.library.log


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_and_its_logits_are_those_of_the_models_own_cache(
    models: dict[str, LoadedModel],
    expected: dict[str, tuple[list[int], Tensor]],
    kind: str,
    cuts: tuple[int, ...],
) -> None:
    chosen, logits = FlashPages(models[kind]).continue_greedily(PROMPT, cuts, NUM_NEW)

    assert chosen == expected[kind][0]
    assert (logits - expected[kind][1]).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_with_a_prefix_hit_computes_what_each_does_alone(
    models: dict[str, LoadedModel], expected: dict[str, tuple[list[int], Tensor]], kind: str
) -> None:
    pages = FlashPages(models[kind])
    first = pages.allocate(len(PROMPT))
    pages.prefill(PROMPT, (0, 45), first)
    hit = first[:3] + pages.allocate(len(PROMPT) - 24)  # 24 tokens are another's
    fresh, decoding = pages.allocate(len(PROMPT)), pages.allocate(len(PROMPT))
    pages.prefill(PROMPT, (0, 20, 44), decoding)

    logits = pages.runner.forward(
        Batch(
            [
                SequenceSlice(PROMPT[44:], 44, decoding),
                SequenceSlice(PROMPT[24:], 24, hit),
                SequenceSlice(PROMPT, 0, fresh),
            ]
        )
    )

    assert logits.shape == (3, VOCABULARY)
    assert (logits - expected[kind][1][0]).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_each_group_of_layers_is_planned_once_a_forward(
    models: dict[str, LoadedModel], kind: str
) -> None:
    pages = FlashPages(models[kind])
    slots = pages.allocate(len(PROMPT))

    pages.prefill(PROMPT, (0, 40, 44), slots)
    made = len(pages.log.made)
    pages.prefill(PROMPT, (44, 45), slots)
    pages.prefill(PROMPT, (44, 45), slots)

    groups = NUM_GROUPS[kind]
    assert len(pages.log.plans) == 4 * groups
    assert [plan.is_decode for plan in pages.log.plans] == [False] * 2 * groups + [
        True
    ] * 2 * groups
    assert len(pages.log.runs) == 4 * LAYERS
    assert (made, len(pages.log.made)) == (groups, 2 * groups)  # wrappers are kept
    assert len({wrapper.workspace.data_ptr() for wrapper in pages.log.made}) == 1


def test_layers_are_read_where_they_are(models: dict[str, LoadedModel]) -> None:
    pages = FlashPages(models["llama"])

    pages.prefill(PROMPT, (0, 45), pages.allocate(len(PROMPT)))

    for layer, (_, keys) in enumerate(pages.log.runs):
        assert keys.data_ptr() == pages.pool[:, layer, 0].data_ptr()
        assert keys.stride() == pages.pool[:, layer, 0].stride()


def test_every_layer_waits_before_it_touches_a_page(models: dict[str, LoadedModel]) -> None:
    pages = FlashPages(models["llama"])
    slots = pages.allocate(len(PROMPT))
    expected = pages.prefill(PROMPT, (0, 20, 45), slots)
    kept = pages.pool[list(slots[:3])].clone()
    pages.pool[list(slots)] = 1e4

    def wait(layer: int) -> None:
        # Whole pages arrive, with them the rest of page 2, which this forward writes.
        pages.pool[list(slots[:3]), layer] = kept[:, layer]
        pages.pool[slots[2], layer, :, 4:] = 1e4

    logits = pages.runner.forward(Batch([SequenceSlice(PROMPT[20:], 20, slots)], wait))[0]

    assert (logits - expected).abs().max() <= 1e-5


# ---------------------------------------------------------------- against the torch path


def random_step(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int = 64
) -> tuple[Tensor, list[Span], tuple[Tensor, Tensor, Tensor]]:
    """Return a pool, three sequences, and query, key and value of their new tokens."""
    generator = torch.Generator().manual_seed(head_dim)
    pages = torch.randn(20, 2, 2, 8, 2, head_dim, generator=generator).to(kv_dtype)
    order = torch.randperm(20, generator=generator).numpy()
    spans = [Span(1, 30, order[:4]), Span(9, 13, order[4:7]), Span(5, 0, order[7:8])]
    new = [torch.randn(heads, 15, head_dim, generator=generator) for heads in (6, 2, 2)]
    return pages, spans, (new[0].to(dtype), new[1].to(dtype), new[2].to(dtype))


TRAITS = {
    "plain": Traits(0.2),
    "window": Traits(0.2, window=7),
    "softcap": Traits(0.2, softcap=3.0),
    "sinks": Traits(0.2, sinks=torch.linspace(-2, 2, 6)),
    "all": Traits(0.2, window=5, softcap=3.0, sinks=torch.linspace(-2, 2, 6)),
}


@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.bfloat16, 0.05),
        (torch.float16, torch.float16, 0.004),
        (torch.bfloat16, torch.float8_e4m3fn, 0.05),
    ],
    ids=["bf16", "fp16", "fp8 pages"],
)
def test_it_agrees_with_the_torch_path_and_writes_the_same_bytes(
    dtype: torch.dtype, kv_dtype: torch.dtype, tolerance: float, traits: Traits
) -> None:
    pages, spans, (query, key, value) = random_step(dtype, kv_dtype)
    twin = pages.clone()
    flash = FlashInferBackend(pages, dtype, FakeFlashInfer(), WORKSPACE).begin(spans, never_wait)
    torch_ = TorchBackend(twin, dtype).begin(spans, never_wait)

    found = flash.attend(1, query, key, value, traits)
    expected = torch_.attend(1, query, key, value, traits)

    assert found.dtype == dtype
    assert (found.float() - expected.float()).abs().max() <= tolerance
    assert torch.equal(pages.view(torch.uint8), twin.view(torch.uint8))


def test_what_an_8_bit_float_cannot_hold_becomes_the_largest_that_it_can() -> None:
    pages, spans, (query, key, value) = random_step(torch.bfloat16, torch.float8_e4m3fn)
    key[0, 0, 0] = 1e5

    TorchBackend(pages, torch.bfloat16).begin(spans, never_wait).attend(
        0, query, key, value, Traits(0.2)
    )

    assert float(pages[spans[0].slots[3], 0, 0, 30 % 8, 0, 0]) == 448


# ---------------------------------------------------------------- fixed forms, for CUDA graphs


class Replayer:
    """Records nothing: computes anew, from the same memory into the same memory."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self.error: RuntimeError | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        if self.error is not None:
            raise self.error
        self.num_recorded += 1
        result = compute()

        def replay() -> None:
            self.num_replayed += 1
            result.copy_(compute())

        return result, replay


@pytest.mark.parametrize("kind", KINDS)
def test_decode_in_graphs_is_that_of_the_models_own_cache(
    models: dict[str, LoadedModel], expected: dict[str, tuple[list[int], Tensor]], kind: str
) -> None:
    pages, replayer = FlashPages(models[kind]), Replayer()
    pages.pool.zero_()  # as at the start: a graph is warmed up on a page of it
    pages.runner.use_graphs(4, replayer)
    assert replayer.num_recorded == len(batch_sizes(4)) == 3
    slots = [pages.allocate(len(PROMPT) + NUM_NEW) for _ in range(3)]
    for own in slots:
        pages.prefill(PROMPT, (0, 45), own)
    tokens, rows = expected[kind]

    for step in range(1, NUM_NEW):
        pieces = [SequenceSlice(tokens[step - 1 : step], 44 + step, own) for own in slots]
        logits = pages.runner.forward(Batch(pieces[: 1 + step % 3]))  # and filled up
        if step % 3 != 2:
            pages.runner.forward(Batch(pieces[1 + step % 3 :]))

        assert (logits - rows[step]).abs().max() <= 1e-4

    assert replayer.num_recorded == 3
    assert pages.runner.graphs is not None
    assert pages.runner.graphs.is_on


def test_a_graph_writes_new_tokens_only_and_waits_for_every_layer_before(
    models: dict[str, LoadedModel],
) -> None:
    pages = FlashPages(models["llama"])
    pages.runner.use_graphs(4, Replayer())
    slots = [pages.allocate(len(PROMPT)) for _ in range(3)]
    for own in slots:
        pages.prefill(PROMPT, (0, 44), own)
    before = pages.pool.clone()
    waited: list[tuple[int, bool]] = []

    def wait(layer: int) -> None:
        waited.append((layer, torch.equal(before, pages.pool)))

    pieces = [SequenceSlice(PROMPT[44:], 44, own) for own in slots]
    pages.runner.forward(Batch(pieces, wait))

    changed = (pages.pool != before).flatten(4).any(-1)  # [N, L, 2, S]
    assert {(int(n), int(s)) for n, _, _, s in changed.nonzero()} == {
        (own[44 // 8], 44 % 8) for own in slots
    }
    assert waited == [(layer, True) for layer in range(LAYERS)]


def test_where_a_graph_cannot_be_recorded_decode_goes_on_without(
    models: dict[str, LoadedModel],
    expected: dict[str, tuple[list[int], Tensor]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages, replayer = FlashPages(models["llama"]), Replayer()
    replayer.error = RuntimeError("operation not permitted when stream is capturing\nand more")

    pages.runner.use_graphs(4, replayer)
    chosen, _ = pages.continue_greedily(PROMPT, (0, 45), NUM_NEW)

    assert chosen == expected["llama"][0]
    assert len(caplog.messages) == 1
    assert "without CUDA graphs" in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


def test_prefill_and_batches_that_are_too_large_are_no_work_for_a_graph(
    models: dict[str, LoadedModel],
) -> None:
    pages, replayer = FlashPages(models["llama"]), Replayer()
    pages.runner.use_graphs(2, replayer)
    num_replayed = replayer.num_replayed
    slots = [pages.allocate(9) for _ in range(3)]

    for own in slots:
        pages.prefill(PROMPT[:8], (0, 8), own)
    pages.runner.forward(Batch([SequenceSlice(PROMPT[8:9], 8, own) for own in slots]))
    assert replayer.num_replayed == num_replayed
    pages.runner.forward(Batch([SequenceSlice(PROMPT[8:9], 8, own) for own in slots[:2]]))

    assert replayer.num_replayed == num_replayed + 1


def test_the_torch_path_has_no_fixed_form(models: dict[str, LoadedModel]) -> None:
    pages = Pages(models["llama"])

    pages.runner.use_graphs(4, Replayer())

    assert pages.runner.graphs is None


@pytest.mark.parametrize("max_batch", [1, 2, 3, 8, 32, 33, 500])
def test_there_is_a_graph_for_every_batch_that_may_be(max_batch: int) -> None:
    sizes = batch_sizes(max_batch)

    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_batch
    waste = [min(size for size in sizes if size >= n) - n for n in range(1, max_batch + 1)]
    assert max(waste) < 16


# ---------------------------------------------------------------- whether it can be used


def test_what_does_not_fit_is_said_in_a_line_and_torch_takes_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bf16, cpu = torch.bfloat16, torch.device("cpu")

    assert choose_attention("flashinfer", cpu, bf16, bf16, 128) == "torch"
    assert caplog.messages == [
        "attention by torch, which is slower than FlashInfer: it needs a GPU, and the device is cpu"
    ]
    assert choose_attention("auto", cpu, bf16, bf16, 128) == "torch"
    assert choose_attention("torch", torch.device("cuda"), bf16, bf16, 128) == "torch"
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "capability", "why"),
    [
        (torch.float32, torch.float32, 128, (9, 0), "does not compute float32"),
        (torch.bfloat16, torch.float32, 128, (9, 0), "on pages of float32"),
        (torch.bfloat16, torch.bfloat16, 80, (9, 0), "no kernels for heads of 80"),
        (torch.float16, torch.float16, 64, (7, 5), "older than its kernels"),
        (torch.float16, torch.float8_e4m3fn, 256, (9, 0), "not installed"),
    ],
)
def test_why_it_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    why: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)

    found = why_not_flashinfer(torch.device("cuda"), dtype, kv_dtype, head_dim)

    assert found is not None
    assert why in found


def test_groups_tell_apart_all_that_a_plan_depends_on() -> None:
    groups = {
        Group(heads, scaling, window, softcap)
        for heads in (4, 8)
        for scaling in (0.1, 0.2)
        for window in (None, 7)
        for softcap in (None, 5.0)
    }

    assert len(groups) == 16


# ---------------------------------------------------------------- the stand-in and the real one


def _defined(tree: ast.Module, owner: str, name: str) -> dict[str, str | None]:
    """Return the parameters of the last definition of a method, with their defaults' source."""
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    methods = [
        node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    arguments = methods[-1].args
    names = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(names) - len(arguments.defaults))]
    pairs = [
        *zip(names, [*defaults, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {
        argument.arg: None if default is None else ast.unparse(default)
        for argument, default in pairs
    }


@pytest.mark.parametrize(
    ("owner", "module", "method", "real"),
    [
        ("BatchPrefillWithPagedKVCacheWrapper", "prefill", "__init__", "__init__"),
        ("BatchPrefillWithPagedKVCacheWrapper", "prefill", "plan", "plan"),
        ("BatchPrefillWithPagedKVCacheWrapper", "prefill", "run", "run"),
        ("BatchDecodeWithPagedKVCacheWrapper", "decode", "__init__", "__init__"),
        ("BatchDecodeWithPagedKVCacheWrapper", "decode", "plan", "_plan_impl"),
        ("BatchDecodeWithPagedKVCacheWrapper", "decode", "run", "run"),
    ],
)
def test_the_stand_in_has_the_signatures_of_the_package(
    owner: str, module: str, method: str, real: str
) -> None:
    spec = importlib.util.find_spec("flashinfer")  # looks for it; imports nothing
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer is not installed")
    source = Path(spec.origin).with_name(f"{module}.py").read_text(encoding="utf-8")
    theirs = _defined(ast.parse(source), owner, real)

    ours = inspect.signature(getattr(getattr(fake_flashinfer, owner), method)).parameters

    named = [
        name
        for name, parameter in ours.items()
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    assert [name for name in theirs if name in ours] == named
    for name in named:
        default = ours[name].default
        expected = theirs[name]
        if default is inspect.Parameter.empty:
            assert expected is None
        else:
            assert expected is not None
            assert ast.literal_eval(expected) == default
