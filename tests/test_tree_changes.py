"""What changes a tree: every method, and what holds afterwards."""

import operator
from collections.abc import Callable

import pytest

from hicache.keys import chain
from hicache.tree import SORT_ABOVE, HiRadixTree, Match, Node
from tests.trees import NAMESPACE, Reading, insert, packed, reside, slots


@pytest.fixture
def tree() -> HiRadixTree:
    return HiRadixTree(NAMESPACE, page_size=1)


@pytest.fixture
def pairs() -> HiRadixTree:
    """A tree with pages of two tokens."""
    return HiRadixTree(NAMESPACE, page_size=2)


# ---------------------------------------------------------------- locate, add, grow


def test_locate_returns_the_node_at_the_end_of_what_is_known(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3))

    assert tree.locate(packed(1, 2, 3)) is leaf
    assert tree.locate(packed(1, 2, 3, 4)) is leaf
    assert tree.locate(packed(9)) is tree.root


def test_locate_splits_where_the_known_part_ends_inside_a_node(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3))

    upper = tree.locate(packed(1, 2, 9))

    assert (upper.tokens, leaf.tokens) == (packed(1, 2), packed(3))
    assert leaf.path() == [upper, leaf]


def test_locate_can_begin_below_the_root(tree: HiRadixTree) -> None:
    insert(tree, packed(1, 2))
    top = tree.locate(packed(1))
    leaf = insert(tree, packed(1, 2, 3))

    assert tree.locate(packed(2, 3), top) is leaf


def test_only_whole_pages_are_added(pairs: HiRadixTree) -> None:
    with pytest.raises(AssertionError):
        pairs.add(pairs.root, packed(1), now=0)
    with pytest.raises(AssertionError):
        pairs.add(pairs.root, packed(1, 2, 3), now=0)


def test_a_child_is_added_once(tree: HiRadixTree) -> None:
    insert(tree, packed(1, 2))

    with pytest.raises(AssertionError):
        tree.add(tree.root, packed(1, 3), now=0)


def test_a_new_node_says_when_it_was_made_and_where_it_begins(tree: HiRadixTree) -> None:
    top = insert(tree, packed(1, 2))

    leaf = tree.add(top, packed(3), now=5.0)

    assert (leaf.start, leaf.num_pages, leaf.end) == (2, 1, 3)
    assert (leaf.created, leaf.last_used) == (5.0, 5.0)
    assert not leaf.is_root
    assert tree.root.is_root


def test_a_leaf_grows_and_keeps_its_keys(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2))
    known = [leaf.key(0), leaf.key(1)]

    tree.grow(leaf, packed(3, 4))
    reside(leaf, "device", range(4))

    tree.check()
    assert tree.match(packed(1, 2, 3, 4)) == Match(leaf, 4)
    assert [leaf.key(index) for index in range(4)] == chain(NAMESPACE, packed(1, 2, 3, 4), 4)
    assert known == chain(NAMESPACE, packed(1, 2), 4)


def test_a_node_with_children_does_not_grow(tree: HiRadixTree) -> None:
    top = insert(tree, packed(1))
    insert(tree, packed(1, 2))

    with pytest.raises(AssertionError):
        tree.grow(top, packed(3))


# ---------------------------------------------------------------- split


def test_a_split_hands_what_is_known_to_both_halves(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3), now=3.0)
    leaf.uses, leaf.users, leaf.last_user, leaf.priority = 5, 2, 17, 9
    leaf.kept_until, leaf.touched = 8.0, 2.0
    tree.lease(leaf)

    upper = tree.split(leaf, 2)

    tree.check()
    assert (upper.tokens, leaf.tokens) == (packed(1, 2), packed(3))
    inherited = operator.attrgetter(
        "leases", "uses", "users", "last_user", "last_used", "created", "priority", "kept_until"
    )
    assert inherited(upper) == inherited(leaf) == (1, 5, 2, 17, 3.0, 3.0, 9, 8.0)
    assert upper.touched == leaf.touched == 2.0


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize(("resident", "on_way"), [(5, 0), (0, 5), (2, 2), (3, 0), (0, 2), (0, 0)])
def test_a_split_divides_pages_and_beliefs(
    tree: HiRadixTree, cut: int, resident: int, on_way: int
) -> None:
    here, arriving = slots(range(resident)), slots(range(10, 10 + on_way))
    leaf = tree.add(tree.root, packed(1, 2, 3, 4, 5), now=0)
    reside(leaf, "device", here, arriving)
    reside(leaf, "host", range(5))
    leaf.stored, leaf.storing = resident, on_way
    Reading(leaf)

    upper = tree.split(leaf, cut)

    tree.check()
    assert upper.device.slots + leaf.device.slots == here
    assert upper.device.incoming + leaf.device.incoming == arriving
    assert upper.device.num_pages == min(cut, resident + on_way)
    assert (upper.stored + leaf.stored, upper.storing + leaf.storing) == (resident, on_way)
    assert upper.stored + upper.storing == upper.device.num_pages


def test_claims_and_holds_follow_a_split(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3))
    reading = Reading(leaf, "device")

    upper = tree.split(leaf, 1)

    assert reading.nodes == [leaf, upper]
    assert upper.claims == leaf.claims == (reading,)
    assert upper.device.holds == leaf.device.holds == 1
    reading.end()
    assert upper.device.holds == leaf.device.holds == 0
    tree.check()


def test_a_claim_leaves_the_half_that_it_does_not_cover(tree: HiRadixTree) -> None:
    class OnlyUpper(Reading):
        def on_split(self, upper: Node, lower: Node) -> None:
            self.nodes = [upper]
            lower.device.holds -= 1

    class OnlyLower(Reading):
        def on_split(self, upper: Node, lower: Node) -> None:
            upper.device.holds -= 1

    leaf = insert(tree, packed(1, 2, 3))
    above, below = OnlyUpper(leaf, "device"), OnlyLower(leaf, "device")

    upper = tree.split(leaf, 1)

    assert (upper.claims, leaf.claims) == ((above,), (below,))
    tree.check()


def test_whoever_made_the_tree_is_told_of_splits() -> None:
    splits: list[tuple[Node, Node]] = []
    tree = HiRadixTree(NAMESPACE, 1, lambda upper, lower: splits.append((upper, lower)))
    leaf = insert(tree, packed(1, 2, 3))

    upper = tree.split(leaf, 1)

    assert splits == [(upper, leaf)]


@pytest.mark.parametrize("cut", [0, 3])
def test_a_split_leaves_something_on_both_sides(tree: HiRadixTree, cut: int) -> None:
    leaf = insert(tree, packed(1, 2, 3))

    with pytest.raises(AssertionError):
        tree.split(leaf, cut)


# ---------------------------------------------------------------- merge


def test_what_was_split_merges_to_what_it_was(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3, 4))
    reside(leaf, "host", [5, 6, 7])
    leaf.stored = 2
    upper = tree.split(leaf, 1)
    middle = tree.split(leaf, 1)

    merged = tree.merge([upper, middle, leaf])

    tree.check()
    assert merged is leaf
    assert list(tree.nodes()) == [leaf]
    assert leaf.tokens == packed(1, 2, 3, 4)
    assert (leaf.device.slots, leaf.host.slots) == (slots(range(4)), slots([5, 6, 7]))
    assert leaf.stored == 2


def test_a_merged_node_is_as_used_as_the_most_used_of_its_parts(tree: HiRadixTree) -> None:
    lower = insert(tree, packed(1, 2), now=1.0)
    upper = tree.split(lower, 1)
    upper.uses, upper.users, upper.last_used, upper.priority = 3, 2, 5.0, 1
    lower.created, lower.touched, upper.touched = 2.0, 4.0, 3.0

    tree.merge([upper, lower])

    assert (lower.uses, lower.users, lower.last_used, lower.priority) == (3, 2, 5.0, 1)
    assert (lower.created, lower.touched) == (1.0, 3.0)


def test_a_merge_keeps_the_children_and_the_sorted_pages_of_its_parent(tree: HiRadixTree) -> None:
    for n in range(10):
        insert(tree, packed(n, 0, 0))
    lower = tree.match(packed(4, 0, 0)).node
    below = insert(tree, packed(4, 0, 0, 1))
    upper = tree.split(lower, 1)

    tree.merge([upper, lower])

    tree.check()
    assert below.path() == [lower, below]
    assert (upper.parent, upper.children) == (None, {})


def make_first(lower: Node, upper: Node) -> None:
    lower.tree.remove(lower)


def add_a_sibling(lower: Node, upper: Node) -> None:
    insert(lower.tree, packed(1, 2, 9))


def lease_the_upper(lower: Node, upper: Node) -> None:
    lower.tree.lease(upper)


def claim_the_upper(lower: Node, upper: Node) -> None:
    Reading(upper, "device")


def claim_the_lower(lower: Node, upper: Node) -> None:
    Reading(lower, "device")


def keep_the_upper(lower: Node, upper: Node) -> None:
    upper.kept_until = 1.0


def leave_a_hole_in_l1(lower: Node, upper: Node) -> None:
    reside(upper, "device", [0])


def leave_a_hole_in_l2(lower: Node, upper: Node) -> None:
    reside(lower, "host", [0])


def leave_a_hole_in_l3(lower: Node, upper: Node) -> None:
    lower.stored = 1


@pytest.mark.parametrize(
    "change",
    [
        make_first, add_a_sibling, lease_the_upper, claim_the_upper, claim_the_lower,
        keep_the_upper, leave_a_hole_in_l1, leave_a_hole_in_l2, leave_a_hole_in_l3,
    ],
)  # fmt: skip
def test_nodes_that_differ_are_not_mergeable(
    tree: HiRadixTree, change: Callable[[Node, Node], None]
) -> None:
    lower = insert(tree, packed(1, 2, 3, 4))
    upper = tree.split(lower, 2)
    assert tree.is_mergeable(lower)

    change(lower, upper)

    assert not tree.is_mergeable(lower)


def test_the_first_node_of_a_tree_is_not_mergeable(tree: HiRadixTree) -> None:
    assert not tree.is_mergeable(insert(tree, packed(1)))


# ---------------------------------------------------------------- lease


def test_a_lease_covers_the_path_and_tells_what_was_free(tree: HiRadixTree) -> None:
    top = insert(tree, packed(1))
    one, other = insert(tree, packed(1, 2)), insert(tree, packed(1, 3))

    assert tree.lease(one) == [one, top]
    assert tree.lease(other) == [other]
    assert (top.leases, one.leases, other.leases) == (2, 1, 1)
    tree.check()

    assert tree.unlease(one) == [one]
    assert tree.unlease(other) == [other, top]
    assert (top.leases, one.leases, other.leases, tree.root.leases) == (0, 0, 0, 0)


def test_a_lease_is_given_back_once(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1))

    with pytest.raises(AssertionError):
        tree.unlease(leaf)


def test_a_lease_on_the_root_is_none(tree: HiRadixTree) -> None:
    assert tree.lease(tree.root) == tree.unlease(tree.root) == []


# ---------------------------------------------------------------- remove and shrink


def test_removing_a_node_takes_what_is_below_it(tree: HiRadixTree) -> None:
    top = insert(tree, packed(1))
    insert(tree, packed(1, 2))
    reside(top, "host", [5])

    tree.remove(top)

    assert list(tree.nodes()) == []
    assert (tree.root.device.children, tree.root.host.children) == (0, 0)
    tree.check()


def test_shrinking_forgets_the_tail(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3))
    reside(leaf, "device", [7])

    tree.shrink(leaf, 1)

    tree.check()
    assert tree.match(packed(1, 2, 3)) == Match(leaf, 1)


def test_shrinking_to_nothing_removes_the_node(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3))
    reside(leaf, "device", [])

    tree.shrink(leaf, 0)

    tree.check()
    assert list(tree.nodes()) == []


def test_a_page_that_is_somewhere_is_not_forgotten(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3))
    stored = tree.add(tree.root, packed(2, 2), now=0)
    stored.stored = 2

    with pytest.raises(AssertionError):
        tree.shrink(leaf, 2)
    with pytest.raises(AssertionError):
        tree.shrink(stored, 1)


def test_beyond_some_children_their_first_pages_are_sorted_and_back(tree: HiRadixTree) -> None:
    leaves = [insert(tree, packed(n)) for n in (5, 3, 9, 1, 8, 2, 7, 4)]
    assert (len(leaves), tree.root.firsts) == (SORT_ABOVE, None)

    last = insert(tree, packed(6))
    insert(tree, packed(0))
    assert tree.root.firsts == [packed(n) for n in range(10)]

    tree.remove(leaves[0])
    tree.remove(last)
    assert len(tree.root.children) == SORT_ABOVE
    tree.check()  # which asserts that they are sorted no more


def test_slots_of_a_node_are_its_own(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3))
    everything = leaf.device.slots

    upper = tree.split(leaf, 1)

    assert (upper.device.slots, leaf.device.slots) == (slots([0]), slots([1, 2]))
    assert everything == slots([0, 1, 2])


def test_a_node_shows_what_is_where(tree: HiRadixTree) -> None:
    leaf = insert(tree, packed(1, 2, 3))
    Reading(leaf, "device")

    assert repr(leaf) == (
        "<Node 0+3p device=3+0 host=0+0 stored=0+0 leases=0 holds=1/0 children=0>"
    )
