"""The store over records that are not what they should be.

Names that start with an id are the rows of the project's list of pitfalls.
"""

import pytest

from hicache.errors import StorageError
from hicache.keys import PageKey, PageRef
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.testing.faulty import Fault, Gate, flip, lose, truncate
from tests.stores import (
    OTHER_NAMESPACE,
    PAGE_SIZE,
    WAIT_S,
    World,
    content,
    namespace,
    page_refs,
    slots,
)


@pytest.mark.parametrize("tamper", [truncate, flip, lambda record, random: b""])
def test_r1_r13_a_bad_record_is_a_miss_and_the_rest_of_its_batch_a_hit(tamper: object) -> None:
    a, b, c = pages = page_refs(3)
    with World() as world:
        world.store_pages([a, c])
        world.backend.next("put", Fault(tamper=tamper))  # type: ignore[arg-type]
        world.store_pages([b], first=10)

        assert world.fetch_pages(pages) == [True, False, True]

        assert world.page(128) == content(a.key)
        assert world.page(130) == content(c.key)
        assert world.probe_keys([page.key for page in pages]) == [True, False, True]
        assert world.store.stats().num_corrupt_pages == 1
        assert world.store.stats().is_up


def test_r2_a_bad_record_is_written_anew() -> None:
    [page] = pages = page_refs(1)
    with World() as world:
        world.backend.next("put", Fault(tamper=lambda record, random: b""))
        world.store_pages(pages)
        assert world.fetch_pages(pages) == [False]

        assert world.store_pages(pages) == [True]

        assert world.fetch_pages(pages) == [True]
        assert world.page(128) == content(page.key)


def test_a_bad_record_that_cannot_be_deleted_is_a_miss_all_the_same() -> None:
    pages = page_refs(2)
    with World() as world:
        world.store_pages(pages[:1])
        world.backend.next("put", Fault(tamper=flip))
        world.store_pages(pages[1:], first=1)
        world.backend.next("delete", Fault(error=PermissionError(13, "read-only")))

        assert world.fetch_pages(pages) == [True, False]

        assert world.store.stats().num_corrupt_pages == 1


def test_r11_a_record_that_vanished_is_a_miss_and_is_stored_anew() -> None:
    pages = page_refs(3)
    with World() as world:
        world.store_pages(pages)
        world.backend.next("get", Fault(tamper=lose))
        assert world.fetch_pages(pages) == [False] * 3
        world.store.delete([pages[1].key])

        assert world.store_pages(pages) == [True] * 3

        assert world.fetch_pages(pages) == [True] * 3


def test_r12_later_pages_are_hits_where_earlier_ones_are_missing() -> None:
    pages = page_refs(4)
    with World() as world:
        world.store_pages(pages[2:])

        assert world.fetch_pages(pages) == [False, False, True, True]
        assert world.store.stats().missed == {"fetch": 2}
        assert world.store.stats().dropped == {}


NAMESPACES = {
    "R3 dtype": namespace(layout=KVLayout(1, 1, 16, "float8_e4m3fn", PAGE_SIZE)),
    "R4 config": namespace(model_config='{"a":1}'),
    "R14 layout": namespace(layout=KVLayout(2, 1, 4, "bfloat16", PAGE_SIZE)),
    "S1 weights": namespace(weights=b"other"),
    "S9 salt": namespace().salted("tenant"),
    "S10 fields": namespace(model_config="{}w", weights=b"eights"),
}


@pytest.mark.parametrize("reader", NAMESPACES.values(), ids=NAMESPACES)
def test_r3_r4_r14_s1_s9_s10_another_namespace_is_a_miss(reader: Namespace) -> None:
    writer = namespace()
    pages = page_refs(2, namespace=writer.digest)
    with World() as world:
        stored = world.new_op()
        world.fill(pages, [0, 1])
        world.store.store(stored, writer.digest, pages, slots(0, 1))
        assert world.finished(stored).outcomes == (True, True)

        own = world.new_op()
        world.store.fetch(
            own, reader.digest, page_refs(2, namespace=reader.digest), slots(128, 129)
        )
        assert world.finished(own).outcomes == (False, False)

        same_keys = world.new_op()
        world.store.fetch(same_keys, reader.digest, pages, slots(128, 129))
        assert world.finished(same_keys).outcomes == (False, False)


def test_s8_a_page_with_the_same_key_and_other_tokens_is_a_miss() -> None:
    [page] = page_refs(1)
    other = PageRef(page.key, page.parent, 0, bytes(len(page.tokens)))
    with World() as world:
        world.store_pages([other])

        assert world.fetch_pages([page]) == [False]
        assert world.store.stats().num_corrupt_pages == 1


def descriptor_is_stored(world: World, described: Namespace) -> bool:
    return world.probe_keys([PageKey(described.digest)]) == [True]


def store_one_page(world: World, into: Namespace, first_token: int = 0) -> None:
    pages = page_refs(1, first_token=first_token, namespace=into.digest)
    op = world.new_op()
    world.fill(pages, [0])
    world.store.store(op, into.digest, pages, slots(0))
    assert world.finished(op).outcomes == (True,)


def test_a_descriptor_that_failed_is_stored_with_the_next_store_of_its_namespace() -> None:
    mine, other = namespace(), namespace(weights=b"other")
    with World() as world:
        world.backend.next("put", Fault(error=StorageError("no")))
        world.store.describe(mine)
        world.wait_until(lambda: world.store.stats().errors == {"describe_StorageError": 1})

        store_one_page(world, other)
        assert world.store.flush(WAIT_S)
        assert not descriptor_is_stored(world, mine)

        store_one_page(world, mine)
        assert world.store.flush(WAIT_S)
        assert descriptor_is_stored(world, mine)


def test_a_descriptor_that_is_stored_is_not_stored_again() -> None:
    mine = namespace()
    with World() as world:
        world.store.describe(mine)
        assert world.store.flush(WAIT_S)
        num_calls = world.backend.num_calls["put"]

        for number in range(3):
            store_one_page(world, mine, first_token=100 * number)
        assert world.store.flush(WAIT_S)

        assert world.backend.num_calls["put"] == num_calls + 3


def test_only_so_many_descriptors_are_remembered() -> None:
    first = namespace(weights=b"0")
    with World(config={"breaker_failures": 10_000}) as world:
        world.backend.always(Fault(error=StorageError("no")), "put")
        for number in range(1025):
            world.store.describe(namespace(weights=b"%d" % number))
        assert world.store.flush(WAIT_S)
        world.backend.heal()

        store_one_page(world, first)
        assert world.store.flush(WAIT_S)

        assert not descriptor_is_stored(world, first)


def test_two_namespaces_can_share_a_batch() -> None:
    mine = page_refs(2)
    theirs = page_refs(2, namespace=OTHER_NAMESPACE)
    with World(config={"concurrency": 1}) as world:
        gate = Gate()
        world.backend.next("contains", Fault(before=gate))
        blocker = world.start_store(page_refs(1, first_token=900), first=20)
        gate.wait_until_reached()
        one = world.start_store(mine)
        two = world.new_op()
        world.fill(theirs, [10, 11])
        world.store.store(two, OTHER_NAMESPACE, theirs, slots(10, 11))
        gate.open()
        for op in (blocker, one, two):
            assert all(world.finished(op).outcomes)
        assert world.backend.num_calls["put"] == 2

        assert world.fetch_pages(mine) == [True, True]
        fetched = world.new_op()
        world.store.fetch(fetched, OTHER_NAMESPACE, theirs, slots(140, 141))
        assert world.finished(fetched).outcomes == (True, True)
