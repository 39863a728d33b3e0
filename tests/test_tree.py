"""What is found in a tree: matches, tiers, partial matches, keys."""

from collections.abc import Callable
from typing import SupportsIndex

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hicache.keys import PageKey, chain, pack
from hicache.tree import HiRadixTree, Match, Node, Partial, TierPages
from hicache.tree import node as module_of_nodes
from tests.trees import NAMESPACE, insert, packed, reside


@pytest.fixture
def tree() -> HiRadixTree:
    return HiRadixTree(NAMESPACE, page_size=1)


@pytest.fixture
def pairs() -> HiRadixTree:
    """A tree with pages of two tokens."""
    return HiRadixTree(NAMESPACE, page_size=2)


# ---------------------------------------------------------------- match


def test_an_empty_tree_matches_nothing(tree: HiRadixTree) -> None:
    assert tree.match(packed(1, 2)) == Match(tree.root, 0)


def test_a_match_counts_whole_pages(pairs: HiRadixTree) -> None:
    leaf = insert(pairs, packed(1, 2, 3, 4))

    assert pairs.match(packed(1, 2, 3)) == Match(leaf, 1)
    assert pairs.match(packed(1)) == Match(pairs.root, 0)
    assert pairs.match(packed(1, 2, 3, 4, 5)) == Match(leaf, 2)


def test_a_match_runs_through_nodes_and_ends_inside_one(tree: HiRadixTree) -> None:
    insert(tree, packed(1, 2, 3))
    leaf = insert(tree, packed(1, 2, 4, 5, 6))

    found = tree.match(packed(1, 2, 4, 5, 9))

    assert (found.node, found.num_pages, found.inside) == (leaf, 4, 2)


@given(st.integers(1, 70), st.integers(1, 70))
def test_a_match_finds_the_first_difference_inside_a_node(num_pages: int, agreeing: int) -> None:
    tree = HiRadixTree(NAMESPACE, page_size=1)
    insert(tree, pack(range(num_pages)))

    found = tree.match(pack([*range(agreeing), 1000, *range(agreeing + 1, num_pages)]))

    assert found.num_pages == min(agreeing, num_pages)


def test_a_match_changes_nothing() -> None:
    def on_split(upper: Node, lower: Node) -> None:
        pytest.fail("it split a node")

    tree = HiRadixTree(NAMESPACE, 1, on_split)
    insert(tree, packed(1, 2, 3), now=1.0)
    before = [(repr(node), node.last_used, node.uses) for node in tree.nodes()]

    tree.match(packed(1, 2, 9)).tiers()

    assert [(repr(node), node.last_used, node.uses) for node in tree.nodes()] == before


def test_a_match_copies_one_page_of_tokens_a_node() -> None:
    class Counted(bytes):
        copied = 0

        def __getitem__(self, index: SupportsIndex | slice) -> bytes:  # type: ignore[override]
            part = super().__getitem__(index)
            assert isinstance(part, bytes)
            Counted.copied += len(part)
            return part

    tree = HiRadixTree(NAMESPACE, page_size=16)
    tokens = pack(range(16 * 64))
    for end in range(1, 65):
        insert(tree, tokens[: end * tree.page_nbytes])

    found = tree.match(Counted(tokens))

    assert len(found.node.path()) == found.num_pages == 64
    assert Counted.copied == len(tokens)


# ---------------------------------------------------------------- tiers of a match


@pytest.mark.parametrize(
    ("device", "host", "stored", "expected"),
    [
        ([4, 4], [0, 0], [0, 0], TierPages(8, 8, 8)),
        ([4, 2], [0, 0], [0, 4], TierPages(6, 6, 8)),
        ([4, 2], [0, 3], [0, 4], TierPages(6, 7, 8)),
        ([4, 2], [0, 1], [0, 4], TierPages(6, 6, 8)),
        ([2, 0], [4, 4], [0, 0], TierPages(2, 8, 8)),
        ([0, 0], [4, 0], [0, 4], TierPages(0, 4, 8)),
        ([0, 0], [3, 4], [4, 0], TierPages(0, 3, 8)),
        ([0, 0], [0, 4], [4, 0], TierPages(0, 0, 8)),
        ([0, 0], [0, 4], [0, 0], TierPages(0, 0, 0)),
    ],
)
def test_a_match_says_how_far_each_tier_reaches(
    tree: HiRadixTree,
    device: list[int],
    host: list[int],
    stored: list[int],
    expected: TierPages,
) -> None:
    parent = tree.root
    for index, tokens in enumerate([packed(1, 2, 3, 4), packed(5, 6, 7, 8)]):
        parent = tree.add(parent, tokens, now=0)
        reside(parent, "device", range(device[index]))
        reside(parent, "host", range(host[index]))
        parent.stored = stored[index]

    assert tree.match(packed(1, 2, 3, 4, 5, 6, 7, 8)).tiers() == expected


def test_tiers_end_where_the_match_ends(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3, 4))
    reside(leaf, "host", range(4))
    leaf.stored = 4

    assert tree.match(packed(1, 2, 9)).tiers() == TierPages(2, 2, 2)
    assert tree.match(packed(9)).tiers() == TierPages(0, 0, 0)


def test_pages_on_their_way_are_not_at_hand(tree: HiRadixTree) -> None:
    leaf = tree.add(tree.root, packed(1, 2, 3, 4), now=0)
    reside(leaf, "device", [7], incoming=[8, 9])
    reside(leaf, "host", [1, 2, 3], incoming=[4])

    assert tree.match(packed(1, 2, 3, 4)).tiers() == TierPages(1, 3, 3)


# ---------------------------------------------------------------- partial


def test_a_partial_match_lies_inside_the_node_where_the_match_ended(pairs: HiRadixTree) -> None:
    leaf = insert(pairs, packed(1, 2, 3, 4))

    tokens = packed(1, 2, 3, 9)

    assert pairs.partial(pairs.match(tokens), tokens) == Partial(leaf, 1, 1)


def test_a_partial_match_is_the_child_that_agrees_longest() -> None:
    tree = HiRadixTree(NAMESPACE, page_size=4)
    insert(tree, packed(1, 1, 5, 5))
    best = insert(tree, packed(1, 1, 1, 5))
    insert(tree, packed(2, 1, 1, 1))

    tokens = packed(1, 1, 1, 1)

    assert tree.partial(tree.match(tokens), tokens) == Partial(best, 0, 3)


def test_of_children_that_agree_equally_the_first_in_byte_order_is_taken() -> None:
    tree = HiRadixTree(NAMESPACE, page_size=2)
    insert(tree, packed(1, 5))
    first = insert(tree, packed(1, 4))

    tokens = packed(1, 1)

    assert tree.partial(tree.match(tokens), tokens) == Partial(first, 0, 1)


@pytest.mark.parametrize("wanted", [(1, 2), (1, 2, 9), (1, 2, 9, 9)])
def test_there_is_no_partial_match_where_no_token_agrees(
    pairs: HiRadixTree, wanted: tuple[int, ...]
) -> None:
    insert(pairs, packed(1, 2, 3, 4))
    insert(pairs, packed(1, 2, 5, 6))

    tokens = packed(*wanted)

    assert pairs.partial(pairs.match(tokens), tokens) is None


def test_there_is_no_partial_match_inside_a_node_where_no_token_agrees(pairs: HiRadixTree) -> None:
    insert(pairs, packed(1, 2, 3, 4))

    tokens = packed(1, 2, 9, 9)

    assert pairs.partial(pairs.match(tokens), tokens) is None


PAGE = st.tuples(*[st.integers(0, 3)] * 4)


@given(st.sets(PAGE, min_size=1, max_size=40), PAGE, st.integers(1, 4))
def test_partial_agrees_with_brute_force_however_many_children(
    pages: set[tuple[int, ...]], wanted: tuple[int, ...], num_tokens: int
) -> None:
    tree = HiRadixTree(NAMESPACE, page_size=4)
    for page in sorted(pages):
        insert(tree, pack(page))
    for page in sorted(pages)[::3]:  # so that children also go, across SORT_ABOVE
        tree.remove(tree.locate(pack(page)))
        pages.discard(page)
    tree.check()
    tokens = pack(wanted[:num_tokens])
    assume(wanted[:num_tokens] not in pages)

    found = tree.partial(tree.match(tokens), tokens)

    best = max((agreement(page, wanted[:num_tokens]) for page in pages), default=0)
    assert (found.num_tokens if found else 0) == best
    if found:
        assert agreement(tuple(found.node.tokens[::4]), wanted[:num_tokens]) == best


def agreement(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many leading tokens are equal."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return equal.index(False) if False in equal else len(equal)


# ---------------------------------------------------------------- keys


def keys(*token_ids: int) -> list[PageKey]:
    """Return the keys of pages of one token, from the root on."""
    return chain(NAMESPACE, packed(*token_ids), 4)


@pytest.fixture
def num_hashed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns how many pages have been hashed so far."""
    hashed = 0

    def counted(parent: bytes, tokens: bytes, page_nbytes: int) -> list[PageKey]:
        nonlocal hashed
        found = chain(parent, tokens, page_nbytes)
        hashed += len(found)
        return found

    monkeypatch.setattr(module_of_nodes, "chain", counted)
    return lambda: hashed


def test_a_key_covers_all_before_it(tree: HiRadixTree, num_hashed: Callable[[], int]) -> None:
    insert(tree, packed(1, 2))
    leaf = insert(tree, packed(1, 2, 3, 4))

    assert leaf.key(1) == keys(1, 2, 3, 4)[3]
    assert num_hashed() == 4


def test_keys_are_computed_once_whatever_becomes_of_their_nodes(
    tree: HiRadixTree, num_hashed: Callable[[], int]
) -> None:
    leaf = insert(tree, packed(1, 2, 3, 4))
    leaf.key(3)

    upper = tree.split(leaf, 1)
    middle = tree.split(leaf, 1)
    found = [upper.key(0), middle.key(0), leaf.key(0), leaf.key(1)]
    tree.merge([upper, middle, leaf])
    found += [leaf.key(index) for index in range(4)]
    reside(leaf, "device", range(2))
    tree.shrink(leaf, 2)
    found += [leaf.key(index) for index in range(2)]

    assert found == keys(1, 2, 3, 4) + keys(1, 2, 3, 4) + keys(1, 2)
    assert num_hashed() == 4


def test_a_sibling_reuses_the_keys_of_its_parent(
    tree: HiRadixTree, num_hashed: Callable[[], int]
) -> None:
    insert(tree, packed(1, 2, 3)).key(2)

    other = insert(tree, packed(1, 2, 4))

    assert other.key(0) == keys(1, 2, 4)[2]
    assert num_hashed() == 4


def test_refs_say_what_proves_a_page(tree: HiRadixTree) -> None:
    top = insert(tree, packed(1, 2))
    leaf = insert(tree, packed(1, 2, 3, 4))
    one, two, three, four = keys(1, 2, 3, 4)

    refs = top.refs(0, 1) + top.refs(1, 2) + leaf.refs(0, 2)

    assert [ref.key for ref in refs] == [one, two, three, four]
    assert [ref.parent for ref in refs] == [NAMESPACE, one, two, three]
    assert [ref.number for ref in refs] == [0, 1, 2, 3]
    assert [ref.tokens for ref in refs] == [packed(1), packed(2), packed(3), packed(4)]


def test_leading_keys_are_those_of_the_first_pages(pairs: HiRadixTree) -> None:
    leaf = insert(pairs, packed(1, 2, 3, 4, 5, 6))

    assert leaf.leading_keys(0) == []
    assert leaf.leading_keys(2) == chain(NAMESPACE, packed(1, 2, 3, 4), 8)
