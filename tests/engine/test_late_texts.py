"""Texts that are made while the next step computes, as on a GPU."""

from hicache.engine.generation import Generation
from hicache.engine.model import LoadedModel
from hicache.engine.outputs import Output
from tests.engine.kit import greedy_reference, prompt
from tests.engine.step_bench import Bench, outputs_of, params, tokens_of


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
