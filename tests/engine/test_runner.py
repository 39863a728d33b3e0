"""A model on pages computes what the same model computes on HF's own cache."""

import random
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hicache.engine.model import LoadedModel
from hicache.engine.runner import Batch, SequenceSlice
from tests.engine.paged_runs import PAGE_SIZE, Pages, own_continuation
from tests.engine.tiny_models import (
    KINDS,
    LAYERS,
    VOCABULARY,
    WINDOW,
    load_own,
    tiny_model,
)

FUSED = tuple(kind for kind in KINDS if kind not in ("gemma2", "gpt_oss"))
"""Kinds whose own attention is the fused kernel that ours uses too."""

EXPERTS = ("gpt_oss", "mixtral")
"""Kinds where the batch decides in which shapes an expert computes."""

PROMPT = random.Random(3).choices(range(3, VOCABULARY), k=45)
ONE_PIECE = (0, 45)
CHUNKS = (0, 7, 8, 24, 44, 45)
LONGER_CHUNKS = (0, 7, 9, 24, 45)
NUM_NEW = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    directory = tmp_path_factory.mktemp("models")
    return {kind: tiny_model(directory, kind) for kind in KINDS}


def test_the_prompt_is_longer_than_the_windows() -> None:
    assert len(PROMPT) > 3 * WINDOW > 3 * PAGE_SIZE


# Not for single tokens: their query heads are the rows of one product here, which is faster.
@pytest.mark.parametrize("cuts", [ONE_PIECE, LONGER_CHUNKS], ids=["one piece", "chunks"])
@pytest.mark.parametrize("kind", FUSED)
def test_in_the_same_shapes_a_prompt_is_bit_equal_to_the_models_own_forward(
    models: dict[str, LoadedModel], kind: str, cuts: tuple[int, ...]
) -> None:
    pages = Pages(models[kind])

    logits = pages.prefill(PROMPT, cuts, pages.allocate(len(PROMPT)))

    _, expected = own_continuation(load_own(models[kind]), PROMPT, cuts, 1)
    assert torch.equal(logits, expected[0])


@pytest.mark.parametrize("cuts", [ONE_PIECE, CHUNKS], ids=["one piece", "chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_and_its_logits_are_those_of_the_models_own_cache(
    models: dict[str, LoadedModel], kind: str, cuts: tuple[int, ...]
) -> None:
    chosen, logits = Pages(models[kind]).continue_greedily(PROMPT, cuts, NUM_NEW)

    own = load_own(models[kind])
    expected_ids, expected = own_continuation(own, PROMPT, ONE_PIECE, NUM_NEW)
    assert chosen == expected_ids
    assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_where_pages_are_changes_no_bit(models: dict[str, LoadedModel], kind: str) -> None:
    ids, logits = Pages(models[kind], seed=1).continue_greedily(PROMPT, CHUNKS, NUM_NEW)

    other_ids, other = Pages(models[kind], seed=2).continue_greedily(PROMPT, CHUNKS, NUM_NEW)

    assert ids == other_ids
    assert torch.equal(logits, other)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_were_moved_elsewhere_and_back_change_no_bit(
    models: dict[str, LoadedModel], kind: str
) -> None:
    cuts = (0, 40, 45)
    pages = Pages(models[kind])
    expected = pages.prefill(PROMPT, cuts, pages.allocate(len(PROMPT)))
    slots = pages.allocate(len(PROMPT))
    pages.prefill(PROMPT, cuts[:2], slots)
    host = pages.pool[list(slots)].clone()
    pages.pool[list(slots)] = 0
    restored = pages.allocate(len(PROMPT))
    for row, slot in enumerate(restored):
        pages.pool[slot].copy_(host[row])

    logits = pages.prefill(PROMPT, cuts[1:], restored)

    assert torch.equal(logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_was_zeroed_is_noticed(models: dict[str, LoadedModel], kind: str) -> None:
    cuts = (0, 40, 45)
    pages = Pages(models[kind])
    expected = pages.prefill(PROMPT, cuts, pages.allocate(len(PROMPT)))
    slots = pages.allocate(len(PROMPT))
    pages.prefill(PROMPT, cuts[:2], slots)
    pages.pool[slots[4]] = 0

    logits = pages.prefill(PROMPT, cuts[1:], slots)

    assert (logits - expected).abs().max() > 1e-2


def test_one_layer_and_one_half_of_a_page_are_noticed_too(models: dict[str, LoadedModel]) -> None:
    pages = Pages(models["llama"])
    slots = pages.allocate(len(PROMPT))
    expected = pages.prefill(PROMPT, (0, 40, 45), slots)
    for layer in range(LAYERS):
        for half in (0, 1):
            kept = pages.pool[slots[1], layer, half].clone()
            pages.pool[slots[1], layer, half] = 0

            logits = pages.prefill(PROMPT, (40, 45), slots)

            assert not torch.equal(logits, expected)
            pages.pool[slots[1], layer, half] = kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_of_chunks_and_decodes_computes_what_each_does_alone(
    models: dict[str, LoadedModel], kind: str
) -> None:
    pages = Pages(models[kind])
    done = (20, 44, 0, 39)  # of sequences that go on by 9, 1, 30 and 1 tokens
    new = (9, 1, 30, 1)
    prompts = [PROMPT[shift:] + PROMPT[:shift] for shift in range(4)]
    slots = [pages.allocate(len(PROMPT)) for _ in prompts]
    alone = []
    for tokens, start, count in zip(prompts, done, new, strict=True):
        own = pages.allocate(len(PROMPT))
        alone.append(pages.prefill(tokens, [*((0,) if start else ()), start, start + count], own))
    for tokens, start, own in zip(prompts, done, slots, strict=True):
        if start:
            pages.prefill(tokens, (0, start), own)

    logits = pages.runner.forward(
        Batch(
            [
                SequenceSlice(tokens[start : start + count], start, own)
                for tokens, start, count, own in zip(prompts, done, new, slots, strict=True)
            ]
        )
    )

    assert logits.shape == (4, VOCABULARY)
    assert (logits - torch.stack(alone)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXPERTS])
def test_in_a_batch_of_one_shape_neighbours_change_no_bit(
    models: dict[str, LoadedModel], kind: str
) -> None:
    pages = Pages(models[kind])
    slots = pages.allocate(len(PROMPT))
    pages.prefill(PROMPT, (0, 44), slots)
    rows = []
    for other_length in (3, 43):
        neighbours = []
        for shift in (1, 2):
            tokens = PROMPT[shift:] + PROMPT[:shift]
            own = pages.allocate(len(PROMPT))
            pages.prefill(tokens, (0, other_length), own)
            neighbours.append(
                SequenceSlice(tokens[other_length : other_length + 1], other_length, own)
            )
        batch = Batch([neighbours[0], SequenceSlice(PROMPT[44:], 44, slots), neighbours[1]])
        rows.append(pages.runner.forward(batch)[1])

    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_bfloat16_is_bit_equal_to_the_models_own_forward_in_the_same_shapes(
    tmp_path: Path, kind: str
) -> None:
    loaded = tiny_model(tmp_path, kind, "bfloat16")
    pages = Pages(loaded)

    logits = pages.prefill(PROMPT, ONE_PIECE, pages.allocate(len(PROMPT)))

    _, expected = own_continuation(load_own(loaded), PROMPT, ONE_PIECE, 1)
    assert torch.equal(logits, expected[0])


def test_every_layer_waits_before_it_touches_a_page(models: dict[str, LoadedModel]) -> None:
    pages = Pages(models["llama"])
    slots = pages.allocate(len(PROMPT))
    cuts = (0, 20, 45)
    expected = pages.prefill(PROMPT, cuts, slots)
    kept = pages.pool[list(slots[:3])].clone()
    # The first 20 tokens arrive late, a layer at a time, and whole pages: with them the rest of
    # page 2, which this forward writes.
    pages.pool[list(slots)] = 1e4
    arrived: list[int] = []

    def wait(layer: int) -> None:
        arrived.append(layer)
        pages.pool[list(slots[:3]), layer] = kept[:, layer]
        pages.pool[slots[2], layer, :, 20 % PAGE_SIZE :] = 1e4

    logits = pages.runner.forward(Batch([SequenceSlice(PROMPT[20:], 20, slots)], wait))[0]

    assert arrived == list(range(LAYERS))
    assert torch.equal(logits, expected)


def test_nothing_but_the_new_tokens_is_written(models: dict[str, LoadedModel]) -> None:
    pages = Pages(models["llama"])
    slots = pages.allocate(len(PROMPT))
    pages.prefill(PROMPT, (0, 20), slots)
    before = pages.pool.clone()

    pages.prefill(PROMPT, (20, 30), slots)

    changed = (pages.pool != before).flatten(4).any(-1)  # [N, L, 2, S]
    written = {(slots[position // PAGE_SIZE], position % PAGE_SIZE) for position in range(20, 30)}
    assert {(int(n), int(s)) for n, _, _, s in changed.nonzero()} == written
    assert int(changed.sum()) == len(written) * LAYERS * 2


def test_more_slots_than_the_tokens_need_are_allowed(models: dict[str, LoadedModel]) -> None:
    pages = Pages(models["gemma3_text"])
    exact = pages.prefill(PROMPT, CHUNKS, pages.allocate(len(PROMPT)))

    logits = pages.prefill(PROMPT, CHUNKS, pages.allocate(3 * len(PROMPT)))

    assert torch.equal(logits, exact)


def test_too_few_slots_are_a_bug_that_is_caught(models: dict[str, LoadedModel]) -> None:
    pages = Pages(models["llama"])

    with pytest.raises(AssertionError):
        pages.prefill(PROMPT, ONE_PIECE, pages.allocate(len(PROMPT) - PAGE_SIZE))


def test_slots_can_grow_while_a_forward_of_theirs_is_prepared(
    models: dict[str, LoadedModel],
) -> None:
    pages = Pages(models["llama"])
    slots = pages.allocate(len(PROMPT))

    def wait(layer: int) -> None:
        slots.append(slots[0])  # fails where somebody holds the array's memory

    pages.runner.forward(Batch([SequenceSlice(PROMPT, 0, slots)], wait))

    assert len(slots) == -(-len(PROMPT) // PAGE_SIZE) + LAYERS


def test_token_ids_come_as_any_sequence(models: dict[str, LoadedModel]) -> None:
    pages = Pages(models["llama"])
    slots = pages.allocate(len(PROMPT))
    expected = pages.prefill(PROMPT, ONE_PIECE, slots)

    logits = pages.prefill(array("i", PROMPT), ONE_PIECE, slots)

    assert torch.equal(logits, expected)


def test_every_way_to_cut_a_prompt_gives_the_same_logits(models: dict[str, LoadedModel]) -> None:
    rng = random.Random(5)
    pages = Pages(models["gemma3_text"], num_pages=200)
    whole = pages.prefill(PROMPT, ONE_PIECE, pages.allocate(len(PROMPT)))

    for _ in range(20):
        cuts = [0, *sorted(rng.sample(range(1, 45), rng.randrange(1, 8))), 45]
        assert all(start < end for start, end in pairwise(cuts))
        logits = pages.prefill(PROMPT, cuts, pages.allocate(len(PROMPT)))
        assert (logits - whole).abs().max() <= 1e-4
