"""What becomes of requests when the device has no memory, or fails."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hicache.engine.easing import GOOD_STEPS, Easing
from hicache.engine.engine import Engine, EngineClosed
from hicache.engine.model import LoadedModel
from hicache.engine.recovery import is_device_error, is_device_well
from hicache.engine.runner import Batch
from tests.engine import kit
from tests.engine.kit import GREEDY, GatedPages, greedy_reference, make_engine, prompt, settings
from tests.engine.step_bench import Bench, outputs_of, params, tokens_of

CUDA_ERROR = "CUDA error: an illegal memory access was encountered\nCompile with more"


class SmallDevice:
    """Raises where a forward is of more tokens than it has memory for."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.asked: list[int] = []

    def __call__(self, batch: Batch) -> None:
        num_tokens = sum(len(item.token_ids) for item in batch.sequences)
        self.asked.append(num_tokens)
        if num_tokens > self.num_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")


def small(model: LoadedModel, num_tokens: int, **others: object) -> tuple[Bench, SmallDevice]:
    bench, device = Bench(model, **others), SmallDevice(num_tokens)  # type: ignore[arg-type]
    bench.runner.before = device
    return bench, device


def test_a_step_that_does_not_fit_is_tried_again_smaller(
    llama: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    bench, device = small(llama, 10)
    ids = [prompt(40), prompt(17, 1)]

    requests = [bench.add(one) for one in ids]
    bench.run()

    assert [tokens_of(request) for request in requests] == [
        greedy_reference(llama, one, 16) for one in ids
    ]
    assert device.asked[:3] == [32, 16, 8]
    assert max(device.asked[2:]) == 8
    assert bench.stepper.counters.num_out_of_memory == 2
    assert [message.split(":")[0] for message in caplog.messages] == [
        "no memory for a step of 32 tokens",
        "no memory for a step of 16 tokens",
    ]


def test_a_request_that_does_not_fit_on_its_own_is_refused_and_the_next_ones_run(
    llama: LoadedModel,
) -> None:
    bench, device = small(llama, 0)
    unlucky = bench.add(prompt(20))
    while not unlucky.generation.is_ended:
        bench.stepper.step()
    device.num_tokens = 1000

    lucky = bench.add(prompt(9, 1))
    bench.run()

    last = outputs_of(unlucky)[-1]
    assert last.finish_reason == "error"
    assert last.error is not None
    assert "no memory" in last.error
    assert "engine.chunk_tokens" in last.error
    assert tokens_of(lucky) == greedy_reference(llama, prompt(9, 1), 16)


def test_fixed_chunks_are_tried_again_as_they_are_once(llama: LoadedModel) -> None:
    bench, device = small(llama, 10, fixed_chunks=True)
    unlucky, lucky = bench.add(prompt(40)), bench.add(prompt(9, 1))

    bench.run()

    assert [asked for asked in device.asked if asked > 10] == [32, 32]
    assert outputs_of(unlucky)[-1].finish_reason == "error"
    assert tokens_of(lucky) == greedy_reference(llama, prompt(9, 1), 16)


def test_after_a_while_of_good_steps_more_is_tried() -> None:
    easing = Easing(512)
    assert easing.eased(512)
    assert easing.eased(256)
    assert easing.limit == 128

    for _ in range(GOOD_STEPS):
        easing.went_well()
    assert easing.limit == 256
    for _ in range(GOOD_STEPS):
        easing.went_well()
    assert easing.limit == 512
    assert Easing(8).eased(1) is False


def test_running_out_of_memory_while_decoding_loses_and_repeats_no_token(
    llama: LoadedModel,
) -> None:
    bench, device = small(llama, 100)
    sampled = params(20, temperature=0.9, seed=3)
    reference = bench.add(prompt(12), sampled)
    bench.run()
    request, other = bench.add(prompt(12), sampled), bench.add(prompt(7, 1), params(20))
    for _ in range(5):
        bench.stepper.step()
    device.num_tokens = 1

    bench.run()

    assert tokens_of(request) == tokens_of(reference)
    assert tokens_of(other) == greedy_reference(llama, prompt(7, 1), 20)


# ---------------------------------------------------------------- errors of the device


@contextlib.contextmanager
def failing(model: LoadedModel, *errors: Exception) -> Iterator[None]:
    """Let the model's next forwards raise these, one each."""
    left = list(errors)

    def fail(module: nn.Module, arguments: tuple[object, ...]) -> None:
        if left:
            raise left.pop(0)

    handle = model.model.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()
    assert not left


def test_after_an_error_of_a_device_that_is_well_the_step_is_computed_again(
    llama: LoadedModel,
) -> None:
    with make_engine(llama) as engine:
        with failing(llama, RuntimeError(CUDA_ERROR)):
            assert kit.tokens_of(engine, prompt(20)) == greedy_reference(llama, prompt(20), 16)

        assert engine.counters.num_failed_steps == 1
        assert engine.is_alive


def test_a_request_whose_step_fails_again_is_refused_and_the_engine_goes_on(
    llama: LoadedModel,
) -> None:
    with make_engine(llama) as engine:
        with failing(llama, RuntimeError(CUDA_ERROR), RuntimeError(CUDA_ERROR)):
            last = list(engine.submit(prompt(20), GREEDY))[-1]

        assert last.error == (
            "the step that computed this request failed: "
            "RuntimeError: CUDA error: an illegal memory access was encountered"
        )
        assert kit.tokens_of(engine, prompt(9)) == greedy_reference(llama, prompt(9), 16)


def test_an_engine_whose_device_is_lost_says_so_to_everybody(
    llama: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(
        settings(engine__max_batch=1),
        llama,
        open_cache=GatedPages.open,
        is_device_well=lambda device: False,
    )
    pages = engine.cache
    assert isinstance(pages, GatedPages)
    with engine, failing(llama, RuntimeError(CUDA_ERROR)):
        generations = [engine.submit(prompt(20, seed), GREEDY) for seed in range(3)]
        pages.open_gate()
        lasts = [list(generation)[-1] for generation in generations]

        assert {last.finish_reason for last in lasts} == {"error"}
        for last in lasts:
            assert last.error is not None
            assert last.error.startswith("the device failed, this server must be restarted: ")
            assert "illegal memory access" in last.error
        with pytest.raises(EngineClosed, match="must be restarted"):
            engine.submit(prompt(9), GREEDY)
        assert not engine.is_alive
        assert engine.close()
    assert "must be restarted" in caplog.text


def test_only_errors_of_the_device_are_taken_for_such() -> None:
    assert is_device_error(RuntimeError(CUDA_ERROR))
    assert is_device_error(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling"))
    assert not is_device_error(torch.OutOfMemoryError("CUDA error: out of memory"))
    assert not is_device_error(RuntimeError("the cache is broken"))
    assert not is_device_error(ValueError("CUDA error"))
    assert is_device_well(torch.device("cpu"))
