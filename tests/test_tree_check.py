"""``HiRadixTree.check`` sees what is broken by hand."""

from collections.abc import Callable

import pytest

from hicache.tree import HiRadixTree, Node
from tests.trees import NAMESPACE, Reading, insert, packed, reside, slots

Break = Callable[[HiRadixTree, Node, Node], None]


def a_parent_above_the_root(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    tree.root.parent = top


def a_root_with_tokens(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    tree.root.num_pages = 1


def a_root_with_pages(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    tree.root.stored = 1


def a_child_of_someone_else(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.parent = tree.root


def a_child_under_another_page(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    top.children = {packed(9): leaf}


def an_empty_node(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.num_pages = 0


def half_a_page(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.tokens += b"\0\0"


def a_node_of_another_tree(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.tree = HiRadixTree(NAMESPACE, 1)


def a_node_that_begins_elsewhere(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.start += 1


def half_a_key(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    top.keys = b"k" * 16


def keys_of_no_page(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    top.keys = b"k" * 32 * 3


def keys_behind_a_hole(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.keys = b"k" * 32


def a_page_that_is_nowhere(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    reside(leaf, "device", [0])


def more_pages_than_tokens(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    reside(leaf, "host", [0, 1, 2])


def more_stored_pages_than_tokens(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.stored = 3


def a_hole_in_l1(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    reside(top, "host", [0, 1])
    reside(top, "device", [0])


def a_leased_node_outside_l1(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    reside(leaf, "host", [0, 1])
    reside(leaf, "device", [0])
    tree.lease(leaf)


def a_negative_lease(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.leases = -1


def a_negative_hold(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.host.holds = -1


def a_store_that_holds_no_copy(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    Reading(leaf, "device")
    leaf.storing = 2


def an_unclaimed_load(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    reside(leaf, "device", [0], incoming=[1])


def an_unclaimed_fetch(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    reside(leaf, "host", [], incoming=[0])


def an_unclaimed_store(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.storing = leaf.host.holds = 1


def an_unclaimed_hold_in_l1(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.device.holds = 1


def an_unclaimed_hold_in_l2(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.host.holds = 1


def a_claim_on_another_node(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.claims = (Reading(top, "device"),)


def a_lease_that_the_parent_lacks(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.leases = 1


def a_child_in_l1_that_is_not_counted(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    top.device.children = 0


def a_child_in_l2_that_is_not_counted(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    leaf.host.slots = slots([0])


def first_pages_out_of_order(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    for n in range(2, 11):
        insert(tree, packed(n))
    assert tree.root.firsts is not None
    tree.root.firsts.reverse()


def unsorted_first_pages(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    for n in range(2, 11):
        insert(tree, packed(n))
    tree.root.firsts = None


def needlessly_sorted_first_pages(tree: HiRadixTree, top: Node, leaf: Node) -> None:
    tree.root.firsts = [packed(1)]


@pytest.mark.parametrize(
    ("broken", "seen_by"),
    [
        (a_parent_above_the_root, "root.parent is None"),
        (a_root_with_tokens, "root.start == root.num_pages == 0"),
        (a_root_with_pages, "root.stored == 0"),
        (a_child_of_someone_else, "child.parent is node"),
        (a_child_under_another_page, "== first"),
        (an_empty_node, "node.num_pages > 0"),
        (half_a_page, "len(node.tokens) =="),
        (a_node_of_another_tree, "node.tree is self"),
        (a_node_that_begins_elsewhere, "node.start == parent.end"),
        (half_a_key, "len(node.keys) %"),
        (keys_of_no_page, "len(node.keys) <="),
        (keys_behind_a_hole, "not node.keys or"),
        (a_page_that_is_nowhere, "reach == node.num_pages"),
        (more_pages_than_tokens, "reach == node.num_pages"),
        (more_stored_pages_than_tokens, "reach == node.num_pages"),
        (a_hole_in_l1, "L1 has a hole"),
        (a_leased_node_outside_l1, "node.leases == 0 or"),
        (a_negative_lease, "node.leases"),
        (a_negative_hold, "min("),
        (a_store_that_holds_no_copy, "stores from a free copy"),
        (an_unclaimed_load, "nobody claims"),
        (an_unclaimed_fetch, "nobody claims"),
        (an_unclaimed_store, "nobody claims"),
        (an_unclaimed_hold_in_l1, "nobody claims"),
        (an_unclaimed_hold_in_l2, "nobody claims"),
        (a_claim_on_another_node, "claim.covers(node)"),
        (a_lease_that_the_parent_lacks, "node.leases >= sum"),
        (a_child_in_l1_that_is_not_counted, "node.device.children =="),
        (a_child_in_l2_that_is_not_counted, "node.host.children =="),
        (first_pages_out_of_order, "node.firsts == sorted"),
        (unsorted_first_pages, "SORT_ABOVE"),
        (needlessly_sorted_first_pages, "SORT_ABOVE"),
    ],
)
def test_check_sees(broken: Break, seen_by: str) -> None:
    tree = HiRadixTree(NAMESPACE, page_size=1)
    top = insert(tree, packed(1, 2))
    leaf = insert(tree, packed(1, 2, 3, 4))
    tree.check()
    broken(tree, top, leaf)

    with pytest.raises(AssertionError) as caught:
        tree.check()

    assert seen_by in str(caught.traceback[-1].statement)
