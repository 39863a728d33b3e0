"""Steps over a real tiny model and private pages, one by one, without a thread."""

import pytest

from hicache.engine.model import LoadedModel
from hicache.engine.stepping import STALLS_BEFORE_PREEMPTING
from tests.engine.kit import greedy_reference, prompt
from tests.engine.step_bench import PAGE_SIZE, Bench, outputs_of, params, tokens_of


def test_greedy_text_is_that_of_the_model_itself(llama: LoadedModel) -> None:
    bench = Bench(llama)
    ids = prompt(21)

    request = bench.add(ids)
    bench.run()

    assert tokens_of(request) == greedy_reference(llama, ids, 16)


@pytest.mark.parametrize("lengths", [(1, 7, 8, 9), (40, 3, 64, 31)])
def test_each_of_a_batch_gets_its_own_text(llama: LoadedModel, lengths: tuple[int, ...]) -> None:
    bench = Bench(llama)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]

    requests = [bench.add(ids) for ids in prompts]
    bench.run()

    expected = [greedy_reference(llama, ids, 16) for ids in prompts]
    assert [tokens_of(request) for request in requests] == expected


def test_a_long_prompt_is_computed_in_chunks_beside_decodes(llama: LoadedModel) -> None:
    bench = Bench(llama)
    short, long = prompt(5), prompt(75, 1)

    first = bench.add(short)
    bench.stepper.step()
    second = bench.add(long)
    bench.run()

    assert bench.runner.lengths[:5] == [[5], [1, 31], [1, 31], [1, 13], [1, 1]]
    assert tokens_of(first) == greedy_reference(llama, short, 16)
    assert tokens_of(second) == greedy_reference(llama, long, 16)


def test_fixed_chunks_compute_a_prompt_in_the_same_shapes_whoever_is_there(
    llama: LoadedModel,
) -> None:
    alone, crowded = Bench(llama, fixed_chunks=True), Bench(llama, fixed_chunks=True)
    ids = prompt(75)

    request = alone.add(ids)
    alone.run()
    for seed in (1, 2, 3):
        crowded.add(prompt(40, seed))
    twin = crowded.add(ids)
    crowded.run()

    assert alone.runner.lengths[:4] == [[32], [32], [11], [1]]
    assert all(len(lengths) == 1 for lengths in crowded.runner.lengths)
    assert tokens_of(request) == tokens_of(twin)


def test_no_more_requests_run_than_may(llama: LoadedModel) -> None:
    bench = Bench(llama, max_batch=2)

    for seed in range(5):
        bench.add(prompt(4, seed))
    bench.run()

    assert max(len(lengths) for lengths in bench.runner.lengths) == 2


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(llama: LoadedModel) -> None:
    ids = prompt(12)
    unstopped = Bench(llama)
    whole = unstopped.add(ids)
    unstopped.run()
    outputs = outputs_of(whole)
    text = "".join(output.text for output in outputs)
    at = next(
        at
        for at in range(2, len(text) - 2)
        if text.find(text[at : at + 2]) == at and text[at : at + 2] not in {o.text for o in outputs}
    )
    stop = text[at : at + 2]

    bench = Bench(llama)
    request = bench.add(ids, params(stop=(stop,)))
    bench.run()

    stopped = outputs_of(request)
    assert "".join(output.text for output in stopped) == text[:at]
    assert (stopped[-1].finish_reason, stopped[-1].stop_match) == ("stop", stop)


def test_an_aborted_request_leaves_nothing_and_disturbs_nobody(llama: LoadedModel) -> None:
    bench = Bench(llama)
    ids = prompt(20)
    gone, stays = bench.add(prompt(50, 1)), bench.add(ids)
    for _ in range(4):
        bench.stepper.step()

    bench.stepper.abort(gone)
    bench.stepper.abort(gone)
    bench.run()

    assert outputs_of(gone)[-1].finish_reason == "abort"
    assert tokens_of(stays) == greedy_reference(llama, ids, 16)


@pytest.mark.parametrize("num_pages", [9, 11, 14])
def test_preemption_loses_and_repeats_no_token(llama: LoadedModel, num_pages: int) -> None:
    bench = Bench(llama, num_pages=num_pages)
    prompts = [prompt(20, seed) for seed in range(3)]

    requests = [bench.add(ids, params(40)) for ids in prompts]
    bench.run()

    assert bench.stepper.counters.num_preemptions > 0
    for ids, request in zip(prompts, requests, strict=True):
        assert tokens_of(request) == greedy_reference(llama, ids, 40)
    assert bench.stepper.counters.num_prompt_tokens == 60


def test_sampling_goes_on_after_a_preemption_where_it_was(llama: LoadedModel) -> None:
    sampled = params(40, temperature=0.9, seed=7, ignore_eos=True)
    alone, tight = Bench(llama), Bench(llama, num_pages=9)

    reference = alone.add(prompt(20), sampled)
    alone.run()
    requests = [tight.add(prompt(20), sampled) for _ in range(3)]
    tight.run()

    assert tight.stepper.counters.num_preemptions > 0
    expected = tokens_of(reference)
    assert [tokens_of(request) for request in requests] == [expected] * 3


def test_the_more_important_request_is_not_the_one_preempted(llama: LoadedModel) -> None:
    bench = Bench(llama, num_pages=9)
    low = bench.add(prompt(20, 1), params(40))
    high = bench.add(prompt(20, 2), params(40), priority=1)

    first_id = high.id
    bench.run()

    assert bench.stepper.counters.num_preemptions > 0
    assert high.id == first_id
    assert len(tokens_of(low)) == len(tokens_of(high)) == 40


def test_nobody_is_preempted_before_waiting_has_failed(llama: LoadedModel) -> None:
    bench = Bench(llama, num_pages=6)
    for seed in (1, 2):
        bench.add(prompt(23, seed), params(20))
    for _ in range(3):
        bench.stepper.step()
    assert len(bench.scheduler.running) == 2

    for _ in range(STALLS_BEFORE_PREEMPTING - 1):
        assert not bench.stepper.step()
        assert bench.stepper.counters.num_preemptions == 0
    bench.stepper.step()

    assert bench.stepper.counters.num_preemptions == 1


def test_a_text_that_outgrows_l1_ends_there_and_is_not_lost(
    llama: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(llama, num_pages=4)

    request = bench.add(prompt(20), params(100))
    bench.run()

    outputs = outputs_of(request)
    assert outputs[-1].finish_reason == "length"
    assert 0 < sum(len(output.token_ids) for output in outputs) < 100
    assert "L1 has 4: raise cache.device.size" in caplog.text


def test_an_error_in_a_forward_ends_the_requests_of_that_step_only(llama: LoadedModel) -> None:
    bench = Bench(llama, max_batch=1)
    ids = prompt(10, 1)
    unlucky, lucky = bench.add(prompt(10)), bench.add(ids)
    bench.runner.error = ValueError("no such thing\nwith details")

    with pytest.raises(ValueError, match="no such thing") as raised:
        bench.stepper.step()
    bench.stepper.fail(raised.value)
    bench.run()

    last = outputs_of(unlucky)[-1]
    assert last.finish_reason == "error"
    assert last.error is not None
    assert last.error.endswith("ValueError: no such thing")
    assert tokens_of(lucky) == greedy_reference(llama, ids, 16)
    assert bench.stepper.counters.num_failed_steps == 1


def test_whole_pages_are_committed_as_they_fill(llama: LoadedModel) -> None:
    bench = Bench(llama)
    request = bench.add(prompt(30), params(20))
    committed: list[tuple[int, int]] = []

    while not bench.stepper.is_idle:
        lease = request.lease
        bench.stepper.step()
        if lease is not None:
            committed.append((request.num_computed, lease.num_committed_pages))

    assert committed
    assert all(pages == computed // PAGE_SIZE for computed, pages in committed)


def test_reasoning_is_computed_but_not_committed(llama: LoadedModel) -> None:
    ids = prompt(30)
    thought = greedy_reference(llama, ids, 20)[12]
    bench = Bench(llama)
    request = bench.add(ids, params(40))
    request.reasoning_ids = (thought,)
    lease = None
    while not bench.stepper.is_idle:
        bench.stepper.step()
        lease = request.lease or lease

    at = tokens_of(request).index(thought)
    assert lease is not None
    assert lease.num_committed_pages == (30 + at) // PAGE_SIZE


def test_equal_runs_make_equal_steps(llama: LoadedModel) -> None:
    runs: list[list[list[int]]] = []
    for _ in range(2):
        bench = Bench(llama, num_pages=12)
        for seed in range(4):
            bench.add(prompt(10 + seed, seed), params(30))
        bench.run()
        runs.append(bench.runner.lengths)

    assert runs[0] == runs[1]
