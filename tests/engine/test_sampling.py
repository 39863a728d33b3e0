"""Tokens are drawn as often as their probabilities say, and the same ones for the same seed."""

import math
from collections import Counter

import pytest
import torch

from hicache.engine.outputs import SamplingParams
from hicache.engine.sampling import Sampler, sample

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0, float("-inf"), 3.0]])
NUM_DRAWS = 4000


def shares(params: SamplingParams, logits: torch.Tensor = LOGITS) -> dict[int, float]:
    """Return how often each token was drawn."""
    sampler = Sampler(params)
    drawn = Counter(sample(logits, [sampler])[0] for _ in range(NUM_DRAWS))
    return {token: count / NUM_DRAWS for token, count in drawn.items()}


def expected_shares(logits: torch.Tensor, temperature: float, tokens: set[int]) -> dict[int, float]:
    weights = {token: math.exp(float(logits[0, token]) / temperature) for token in tokens}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def assert_close(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    for token, share in expected.items():
        # Five standard deviations of a count.
        assert abs(found[token] - share) <= 5 * math.sqrt(share * (1 - share) / NUM_DRAWS)


def test_greedy_takes_the_best_token_and_of_equals_the_lowest() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [7.0, 5.0, 5.0]])

    tokens = sample(logits, [Sampler(SamplingParams(temperature=0)) for _ in range(2)])

    assert tokens == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_probability(temperature: float) -> None:
    found = shares(SamplingParams(temperature=temperature, seed=1))

    assert_close(found, expected_shares(LOGITS, temperature, {0, 1, 2, 3, 5}))


def test_top_k_leaves_the_k_best() -> None:
    found = shares(SamplingParams(top_k=3, seed=1))

    assert_close(found, expected_shares(LOGITS, 1.0, {2, 3, 5}))


def test_top_k_of_one_is_greedy() -> None:
    assert shares(SamplingParams(top_k=1, seed=1)) == {3: 1.0}


def test_top_k_above_the_vocabulary_changes_nothing() -> None:
    assert shares(SamplingParams(top_k=99, seed=1)) == shares(SamplingParams(seed=1))


def test_top_p_leaves_the_fewest_tokens_that_have_that_share() -> None:
    # Shares of the best two are 0.40 each, then 0.15, 0.05 and 0.02.
    assert shares(SamplingParams(top_p=0.3, seed=1)).keys() == {3}
    assert shares(SamplingParams(top_p=0.5, seed=1)).keys() == {3, 5}
    assert shares(SamplingParams(top_p=0.9, seed=1)).keys() == {2, 3, 5}
    assert_close(shares(SamplingParams(top_p=0.9, seed=1)), expected_shares(LOGITS, 1.0, {2, 3, 5}))


@pytest.mark.parametrize("top_p", [0.0, 1e-12])
def test_top_p_always_leaves_one_token(top_p: float) -> None:
    assert shares(SamplingParams(top_p=top_p, seed=1)) == {3: 1.0}


def test_top_p_of_one_leaves_every_possible_token() -> None:
    assert shares(SamplingParams(top_p=1.0, temperature=3, seed=1)).keys() == {0, 1, 2, 3, 5}


def test_top_p_acts_on_what_top_k_has_left() -> None:
    # Of the best three, the best two have 0.84; of all, only 0.80.
    assert shares(SamplingParams(top_k=3, top_p=0.82, seed=1)).keys() == {3, 5}


def test_top_p_looks_past_its_shortlist_where_the_share_lies_there() -> None:
    logits = torch.zeros(1, 20_000)
    sampler = Sampler(SamplingParams(top_p=0.5, seed=1))

    drawn = [sample(logits, [sampler])[0] for _ in range(200)]

    assert max(drawn) > 5_000
    assert max(drawn) < 10_000


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    logits = torch.full((1, 50), float("-inf"))
    logits[0, 17] = -1e30

    assert shares(SamplingParams(temperature=100, seed=1), logits) == {17: 1.0}


class FixedSampler(Sampler):
    """Draws the number that it was given."""

    def __init__(self, point: float, params: SamplingParams) -> None:
        super().__init__(params)
        self._point = point

    def draw(self) -> float:
        return self._point


@pytest.mark.parametrize("top_p", [1.0, 0.999])
@pytest.mark.parametrize(("point", "token"), [(0.0, 1), (0.5, 2), (1 - 2**-53, 2)])
def test_the_ends_of_the_range_are_tokens_that_can_be(
    point: float, token: int, top_p: float
) -> None:
    impossible = float("-inf")
    logits = torch.tensor([[impossible, 0.0, 0.0, impossible, impossible]])

    assert sample(logits, [FixedSampler(point, SamplingParams(top_p=top_p))]) == [token]


def test_a_very_low_temperature_is_greedy_and_does_not_overflow() -> None:
    assert shares(SamplingParams(temperature=1e-4, seed=1)).keys() == {3, 5}


def test_the_same_seed_draws_the_same_tokens_in_whatever_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 300, generator=generator)
    params = SamplingParams(seed=7, top_p=0.95)
    alone = Sampler(params)
    expected = [sample(row[None], [alone])[0] for row in rows]

    found = []
    sampler = Sampler(params)
    others = [Sampler(SamplingParams(temperature=1.3)), Sampler(SamplingParams(temperature=0))]
    for index, row in enumerate(rows):
        noise = torch.randn(1, 300)
        batch = [(noise, others[0]), (noise, others[1])]
        batch.insert(index % 3, (row[None], sampler))
        logits = torch.cat([row for row, _ in batch])
        found.append(sample(logits, [sampler for _, sampler in batch])[index % 3])

    assert found == expected


def test_other_seeds_draw_other_tokens() -> None:
    logits = torch.zeros(1, 1000)
    drawn = set()
    for seed in (1, 2, None, None):
        sampler = Sampler(SamplingParams(seed=seed))
        drawn.add(tuple(sample(logits, [sampler])[0] for _ in range(8)))

    assert len(drawn) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_overflowed_has_no_next_token_and_spoils_no_other(temperature: float) -> None:
    logits = torch.zeros(4, 10)
    logits[0, 3] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, 3] = 1000.0
    samplers = [Sampler(SamplingParams(temperature=temperature)) for _ in range(4)]

    assert sample(logits, samplers) == [-1, -1, -1, 3]
