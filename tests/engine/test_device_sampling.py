"""Choosing tokens where the logits are: the same tokens as on the host, and nothing read back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.engine.choosing import begin_choosing
from hicache.engine.device_sampling import pick
from hicache.engine.outputs import SamplingParams
from hicache.engine.sampling import Sampler, sample
from tests.engine.no_sync import NothingReadBack

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 1, 2, 7, 60, 10_000]),
    top_p=st.sampled_from([0.01, 0.5, 0.93, 1.0]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=60)
@given(
    st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 100), st.sampled_from([3, 61, 2000])
)
def test_tokens_are_those_that_the_host_would_choose(
    params: list[SamplingParams], seed: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(params), size, generator=generator)
    logits[0, size // 2] = float("-inf")
    ours, theirs = [Sampler(one) for one in params], [Sampler(one) for one in params]

    for _ in range(3):
        assert pick(logits, ours).tolist() == sample(logits, theirs)
        for sampler in ours:
            sampler.use()


def test_of_equal_logits_the_lowest_tokens_are_taken_first() -> None:
    logits = torch.zeros(1, 50)
    drawn = {
        int(pick(logits, [Sampler(SamplingParams(temperature=1, top_k=3, seed=seed))]))
        for seed in range(40)
    }

    assert drawn == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_has_no_token(temperature: float) -> None:
    logits = torch.zeros(3, 20)
    logits[1] = float("nan")
    logits[2] = float("-inf")

    samplers = [Sampler(SamplingParams(temperature=temperature, seed=1)) for _ in range(3)]

    assert (pick(logits, samplers) < 0).tolist() == [False, True, True]


def test_a_token_that_was_not_used_is_chosen_again() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    used, dropped = (Sampler(SamplingParams(temperature=1.5, seed=9)) for _ in range(2))
    expected = [sample(logits, [used])[0] for _ in range(6)]

    found = []
    for _ in range(6):
        [first] = begin_choosing(logits, [0], [dropped]).wait()
        [again] = begin_choosing(logits, [0], [dropped]).wait()
        dropped.use()
        assert first == again
        found.append(again)

    assert found == expected


def test_rows_that_want_no_token_get_none() -> None:
    logits = torch.eye(4)

    assert begin_choosing(logits, [2, 0], [Sampler(SamplingParams(temperature=0))] * 2).wait() == [
        2,
        0,
    ]
    assert begin_choosing(logits, [], []).wait() == []


def test_nothing_is_read_back_while_tokens_are_chosen() -> None:
    logits = torch.randn(4, 100)
    samplers = [Sampler(SamplingParams(temperature=heat, top_k=9, top_p=0.9)) for heat in (0, 1)]

    with NothingReadBack():
        tokens = pick(logits, samplers * 2)

    assert tokens.dtype == torch.int64
    assert np.all(tokens.numpy() >= 0)
