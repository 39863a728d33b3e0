"""Steps over a real tiny model and private pages, one by one, without a thread."""

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from hicache.engine.detokenizing import Detokenizer
from hicache.engine.generation import Generation
from hicache.engine.model import LoadedModel
from hicache.engine.outputs import Output, SamplingParams
from hicache.engine.requests import Request
from hicache.engine.runner import Batch, ModelRunner
from hicache.engine.sampling import Sampler
from hicache.engine.scheduler import Scheduler
from hicache.engine.stepping import STALLS_BEFORE_PREEMPTING, Stepper
from hicache.engine.stopping import Answer
from hicache.engine.uncached import PrivatePages
from hicache.events import RequestId
from hicache.keys import pack
from tests.engine.kit import GREEDY, greedy_reference, prompt

PAGE_SIZE = 8


class RecordingRunner:
    """The real runner, which also notes what it was asked to compute."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.lengths: list[list[int]] = []
        self.starts: list[list[int]] = []
        self.error: Exception | None = None
        self.before: Callable[[Batch], None] = lambda batch: None
        """May raise."""

    def forward(self, batch: Batch) -> Tensor:
        """Compute, or raise what it was told to raise once."""
        self.lengths.append([len(item.token_ids) for item in batch.sequences])
        self.starts.append([item.start for item in batch.sequences])
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.before(batch)
        return self.runner.forward(batch)


class Bench:
    """A stepper, and what it is made of."""

    def __init__(
        self,
        model: LoadedModel,
        num_pages: int = 64,
        *,
        is_late: bool | None = None,
        **settings: object,
    ) -> None:
        self.model = model
        self.pages = PrivatePages(model.layout_for(PAGE_SIZE), num_pages)
        self.runner = RecordingRunner(ModelRunner(model, self.pages.device_pages))
        settings = {"chunk_tokens": 32, **settings}
        self.scheduler = Scheduler("fcfs", page_size=PAGE_SIZE, **settings)  # type: ignore[arg-type]
        digest = model.namespace(model.layout_for(PAGE_SIZE)).digest
        self.stepper = Stepper(
            self.pages, self.runner, self.scheduler, lambda salt: digest, is_late=is_late
        )
        self.requests: list[Request] = []

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams = GREEDY, priority: int = 0
    ) -> Request:
        """Queue a request."""
        sequence = len(self.requests)
        request = Request(
            id=RequestId(0),
            sequence=sequence,
            tokens=bytearray(pack(prompt_ids)),
            num_prompt_tokens=len(prompt_ids),
            generation=Generation(str(sequence), len(prompt_ids), 0.0, lambda: None),
            sampler=Sampler(params),
            answer=Answer(
                Detokenizer(self.model.tokenizer, prompt_ids), params, self.model.eos_token_ids
            ),
            priority=priority,
        )
        self.requests.append(request)
        self.stepper.add(request)
        return request

    def run(self) -> None:
        """Step until nobody is left."""
        for _ in range(2000):
            if self.stepper.is_idle:
                break
            self.stepper.step()
            self.pages.check()
            self.scheduler.check()
        assert self.stepper.is_idle
        assert self.pages.num_free_pages == len(self.pages.device_pages)


def outputs_of(request: Request) -> list[Output]:
    assert request.generation.is_ended
    return list(request.generation)


def tokens_of(request: Request) -> list[int]:
    return [token_id for output in outputs_of(request) for token_id in output.token_ids]


def params(max_tokens: int = 16, **others: object) -> SamplingParams:
    settings = {"temperature": 0.0, "ignore_eos": True, **others}
    return SamplingParams(max_tokens=max_tokens, **settings)  # type: ignore[arg-type]


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


# ---------------------------------------------------------------- texts that are made later


class Noted(Generation):
    """A reader's end that notes in a list when it is given something."""

    def __init__(self, log: list[str]) -> None:
        super().__init__("noted", 0, 0.0, lambda: None)
        self.log = log

    def put(self, output: Output, now: float) -> None:
        """Note it."""
        self.log.append("told")
        super().put(output, now)


def late_bench(model: LoadedModel) -> tuple[Bench, list[str]]:
    """Return a stepper as on a GPU, and the order in which it computes, tells and takes in."""
    bench = Bench(model, is_late=True)
    log: list[str] = []
    bench.runner.before = lambda batch: log.append("forward")
    bench.stepper.meanwhile = lambda: log.append("arrivals")
    return bench, log


def test_on_a_gpu_texts_are_made_and_arrivals_taken_in_while_the_next_step_computes(
    llama: LoadedModel,
) -> None:
    bench, log = late_bench(llama)
    request = bench.add(prompt(9), params(4))
    request.generation = Noted(log)

    bench.run()

    # The first token is told at once, and so is the last.
    assert " ".join(log).split(" forward ") == [
        "forward arrivals told",
        "arrivals",
        "told arrivals",
        "told arrivals told",
    ]
    assert tokens_of(request) == greedy_reference(llama, prompt(9), 4)


def test_texts_that_are_made_later_are_the_same(llama: LoadedModel) -> None:
    prompts = [prompt(length, length) for length in (5, 21, 40)]
    text = "".join(output.text for output in _alone(llama, prompts[0]))
    cases = [params(12), params(12, temperature=0.8, seed=4), params(12, stop=(text[3:5],))]
    found: list[list[list[Output]]] = []

    for is_late in (False, True):
        bench = Bench(llama, num_pages=11, is_late=is_late)
        requests = [bench.add(ids, case) for ids, case in zip(prompts, cases, strict=True)]
        stopping = bench.add(prompts[0], cases[2])
        bench.run()
        found.append([outputs_of(request) for request in [*requests, stopping]])

    assert found[0] == found[1]
    assert found[1][3][-1].finish_reason == "stop"


def test_what_was_computed_beyond_a_stop_string_is_thrown_away(llama: LoadedModel) -> None:
    text = "".join(output.text for output in _alone(llama, prompt(12)))
    bench, log = late_bench(llama)
    request = bench.add(prompt(12), params(16, stop=(text[4:6],)))

    bench.run()  # which also sees that every page is free

    stopped = outputs_of(request)
    assert "".join(output.text for output in stopped) == text[: text.find(text[4:6])]
    assert log.count("forward") == sum(len(output.token_ids) for output in stopped) + 1
    assert bench.stepper.counters.num_output_tokens == log.count("forward") - 1


def test_a_request_that_is_aborted_while_it_is_computed_leaves_nothing(
    llama: LoadedModel,
) -> None:
    bench, _ = late_bench(llama)
    gone, stays = bench.add(prompt(20, 1)), bench.add(prompt(9))
    for _ in range(3):
        bench.stepper.step()

    bench.stepper.meanwhile = lambda: bench.stepper.abort(gone)
    bench.run()

    assert outputs_of(gone)[-1].finish_reason == "abort"
    assert tokens_of(stays) == greedy_reference(llama, prompt(9), 16)


def _alone(model: LoadedModel, ids: list[int]) -> list[Output]:
    bench = Bench(model)
    request = bench.add(ids)
    bench.run()
    return outputs_of(request)
