"""What HiCache gives back is what was computed: answers with it and without, bit by bit.

Equal to the last bit where the same tokens are computed in the same pieces, wherever their
prefix was found; within rounding, and with the same tokens, where the pieces are others.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hicache.actions import HitTokens
from tests.engine.exact_runs import (
    BRANCH,
    CHUNK,
    FIRST,
    PREFIX,
    SECOND,
    Looking,
    Meddling,
    Models,
    assert_alike,
    assert_equal,
    check,
    found_in,
    greedy,
    looking,
    meddling,
    replayed,
)
from tests.engine.kit import prompt

TINY = ["llama", "qwen3", "gemma3_text", "gpt_oss"]
REAL = "smollm2"
KINDS = [*TINY, pytest.param(REAL, marks=pytest.mark.slow)]
TIERS = ["device", "host", "storage", "restart"]
PAGE_SIZES = [1, 16, 64]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory)


def hit_in(tier: str, num_tokens: int) -> HitTokens:
    """Return a hit of so many tokens, all of them in that tier."""
    if tier == "device":
        return HitTokens(device=num_tokens)
    if tier == "host":
        return HitTokens(host=num_tokens)
    return HitTokens(storage=num_tokens)


def each(*others: Sequence[object], real: Sequence[tuple[object, ...]]) -> list[object]:
    """Return every tiny model with all else, and a few cases of the real one, which is slow."""
    slow = [pytest.param(REAL, *case, marks=pytest.mark.slow) for case in real]
    return [*product(TINY, *others), *slow]


@pytest.mark.parametrize(
    ("kind", "page_size", "tier"),
    each(
        PAGE_SIZES,
        TIERS,
        real=[(16, "device"), (64, "host"), (1, "storage"), (16, "restart")],
    ),
)
def test_a_prefix_from_any_tier_is_as_if_it_had_been_computed(
    models: Models, tmp_path: Path, kind: str, page_size: int, tier: str
) -> None:
    expected = models.say(kind, SECOND, page_size)

    with found_in(tier, models.load(kind), tmp_path, cache__page_size=page_size) as look:
        said = look.ask(SECOND)

    assert said.hit == hit_in(tier, len(PREFIX))
    assert said.pieces == expected.pieces[2:] == ((128, len(SECOND)),)
    assert_equal(said, expected)


@pytest.mark.parametrize(
    ("kind", "page_size", "tier"), each([16, 64], TIERS, real=[(64, "storage")])
)
def test_a_hit_that_ends_inside_a_page_is_exact_too(
    models: Models, tmp_path: Path, kind: str, page_size: int, tier: str
) -> None:
    model = models.load(kind)
    expected = replayed(model, page_size, (FIRST, 0), (BRANCH, 93))

    with found_in(tier, model, tmp_path, cache__page_size=page_size) as look:
        said = look.ask(BRANCH)

    assert said.hit == hit_in(tier, 93)
    assert said.pieces == ((93, len(BRANCH)),)
    assert_equal(said, expected)


@pytest.mark.parametrize(("kind", "tier"), each(TIERS, real=[("restart",)]))
def test_one_spoilt_page_in_l1_would_be_seen(
    models: Models, tmp_path: Path, kind: str, tier: str
) -> None:
    expected = models.say(kind, SECOND)

    with found_in(tier, models.load(kind), tmp_path) as look:
        meddling(look).spoils = True
        said = look.ask(SECOND)

    assert said.hit == hit_in(tier, len(PREFIX))
    assert (said.logits[0] - expected.logits[0]).abs().max() > 0.05


@pytest.mark.parametrize("write_policy", ["write_through_selective", "write_back"])
@pytest.mark.parametrize("tier", ["host", "storage", "restart"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_how_pages_were_written_down_changes_nothing(
    models: Models, tmp_path: Path, kind: str, tier: str, write_policy: str
) -> None:
    # Selectively, a page is written down once a second request uses it.
    num_uses = 2 if write_policy == "write_through_selective" else 1
    expected = models.say(kind, SECOND)

    with found_in(
        tier,
        models.load(kind),
        tmp_path,
        num_uses=num_uses,
        cache__host__write_policy=write_policy,
    ) as look:
        said = look.ask(SECOND)

    assert said.hit == hit_in(tier, len(PREFIX))
    assert_equal(said, expected)


WAYS: dict[str, dict[str, Any]] = {
    "zstd": {"cache__storage__codec": "zstd"},
    "planes": {"cache__storage__codec": "zstd-planes"},
    "sealed": {"cache__storage__key": "5a" * 32},
    "both": {"cache__storage__codec": "zstd-planes", "cache__storage__key": "5a" * 32},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        ("llama", "storage"),
        ("llama", "restart"),
        pytest.param(REAL, "restart", marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_how_pages_lie_in_storage_changes_nothing(
    models: Models, tmp_path: Path, kind: str, tier: str, way: str
) -> None:
    expected = models.say(kind, SECOND)

    with found_in(tier, models.load(kind), tmp_path, **WAYS[way]) as look:
        said = look.ask(SECOND)

    assert said.hit == hit_in(tier, len(PREFIX))
    assert_equal(said, expected)


CROWD = [
    [*PREFIX[: CHUNK * (number % 3)], 10 + number, *prompt(20 + 9 * number, seed=200 + number)]
    for number in range(9)
]
"""Prompts that share one chunk, two, or nothing; all of lengths far apart."""


@pytest.mark.parametrize("kind", TINY)
def test_in_fixed_chunks_a_crowd_is_answered_as_if_each_were_alone(
    models: Models, kind: str
) -> None:
    with looking(models.load(kind), Meddling, cache__device__size="1024") as look:
        said = look.ask_all(CROWD)
        check(look)

    assert {one.hit.total for one in said} == {0, 64, 128}
    for one, ids in zip(said, CROWD, strict=True):
        assert_equal(one, models.say(kind, ids, page_size=8))


@pytest.mark.parametrize(("kind", "chunk_tokens"), each([23, 1024], real=[(50,)]))
def test_a_crowd_in_one_batch_says_the_same_within_rounding(
    models: Models, kind: str, chunk_tokens: int
) -> None:
    crowd = CROWD[: 3 if kind == REAL else None]

    with looking(
        models.load(kind),
        Meddling,
        cache__device__size="1024",
        engine__fixed_chunks=False,
        engine__chunk_tokens=chunk_tokens,
    ) as look:
        said = look.ask_all(crowd)
        again = look.ask_all(crowd)
        largest = look.largest_batch
        check(look)

    assert largest == len(crowd)
    # Whole pages of what was computed, and never the last token of the prompt.
    hits = [min(len(ids) - 1, (len(ids) + 5) // 8 * 8) for ids in crowd]
    assert [one.hit.total for one in again] == hits
    expected = [models.say(kind, ids, page_size=8) for ids in crowd]
    assert_alike([*said, *again], [*expected, *expected])


@pytest.mark.parametrize(
    ("kind", "write_policy"), each(["write_through", "write_back"], real=[("write_through",)])
)
def test_a_request_that_was_preempted_goes_on_as_if_it_had_not_been(
    models: Models, kind: str, write_policy: str
) -> None:
    is_real = kind == REAL
    num_tokens, num_pages = (20, 12) if is_real else (36, 22)
    prompts = [prompt(20 + 40 * number, seed=300 + number) for number in range(2 if is_real else 3)]

    with looking(
        models.load(kind),
        Meddling,
        cache__device__size=f"{num_pages}p",
        cache__host__write_policy=write_policy,
        engine__fixed_chunks=False,
    ) as look:
        said = look.ask_all(prompts, num_tokens=num_tokens)
        check(look)

    assert look.engine.counters.num_preemptions > 0
    expected = [models.say(kind, ids, page_size=8, num_tokens=num_tokens) for ids in prompts]
    assert_alike(said, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_abort_in_mid_prompt_left_behind_is_exact(models: Models, kind: str) -> None:
    with looking(models.load(kind), Meddling, cache__device__size="1024") as look:
        abort_at(look, SECOND, num_tokens=64)
        said = look.ask(SECOND)
        check(look)

    assert said.hit == HitTokens(device=64)
    assert_equal(said, models.say(kind, SECOND, page_size=8))


@pytest.mark.parametrize("kind", TINY)
def test_what_an_abort_in_mid_answer_left_behind_is_exact(models: Models, kind: str) -> None:
    model = models.load(kind)
    expected = replayed(model, 8, (SECOND, 0), (SECOND, len(SECOND) - 1))

    with looking(model, Meddling, cache__device__size="1024") as look:
        abort_at(look, SECOND, num_tokens=len(SECOND) + 10)
        said = look.ask(SECOND)
        check(look)

    assert said.hit == HitTokens(device=len(SECOND) - 1)
    assert_equal(said, expected)


def abort_at(look: Looking, prompt_ids: Sequence[int], num_tokens: int) -> None:
    """Abort a request in the step in which it has committed so many tokens."""
    cache = meddling(look)
    cache.stops_at = num_tokens // cache.page_size
    generation = look.engine.submit(prompt_ids, greedy(50))
    assert cache.is_stopped.wait(60)
    generation.abort()
    cache.may_go_on.set()
    assert list(generation)[-1].finish_reason == "abort"


@pytest.mark.parametrize("kind", TINY)
def test_tenants_get_the_same_answers_from_pages_of_their_own(models: Models, kind: str) -> None:
    first, second = models.say(kind, FIRST, page_size=8), models.say(kind, SECOND, page_size=8)

    with looking(models.load(kind), Meddling, cache__device__size="2048") as look:
        for salt in ("a", "b", None):
            assert_equal(look.ask(FIRST, salt=salt), first)
        for salt in ("a", "b", None):
            said = look.ask(SECOND, salt=salt)
            assert said.hit == HitTokens(device=len(PREFIX))
            assert_equal(said, second)
        assert look.engine.counters.hit_tokens["device"] == 3 * len(PREFIX)
        check(look)


@pytest.mark.parametrize("kind", TINY)
def test_a_long_talk_is_the_same_within_rounding(models: Models, kind: str) -> None:
    """Each turn goes on from keys and values that the turns before computed token by token."""
    ids = prompt(21, seed=400)

    with looking(models.load(kind), Meddling, cache__device__size="1024") as look:
        for turn in range(4):
            said = look.ask(ids, num_tokens=20)
            assert_alike([said], [models.say(kind, ids, page_size=8, num_tokens=20)])
            assert said.hit.total >= (len(ids) - 30 if turn else 0)
            ids = [*ids, *said.token_ids, *prompt(9, seed=401 + turn)]
        check(look)
