"""What a scan of the store finds, put together into chains."""

import struct
from collections.abc import Sequence

import pytest
import xxhash

from hicache.codec import PageCodec, encode_namespace
from hicache.events import ChainFound
from hicache.keys import PageKey, PageRef, pack
from hicache.store.restart import Chains
from hicache.testing.faulty import Fault, Gate, truncate
from tests.stores import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PAGE_NBYTES,
    PAGE_SIZE,
    World,
    namespace,
    page_refs,
    refs_of,
    slots,
)

CODEC = PageCodec(PAGE_SIZE, PAGE_NBYTES)


def header(page: PageRef) -> bytearray:
    encoded = bytearray(CODEC.header_nbytes)
    CODEC.encode(memoryview(encoded), memoryview(bytes(PAGE_NBYTES)), page, NAMESPACE, 0)
    return encoded


def chains_of(*pages: PageRef) -> Chains:
    chains = Chains(CODEC, NAMESPACE)
    for page in pages:
        assert chains.note(page.key, header(page))
    return chains


def chain_of(pages: Sequence[PageRef]) -> ChainFound:
    tokens = b"".join(page.tokens for page in pages)
    return ChainFound(NAMESPACE, tokens, tuple(page.key for page in pages))


def branch(*tokens_of_pages: int) -> list[PageRef]:
    """Return the pages of a sequence, each of one token repeated."""
    return refs_of(pack(token for token in tokens_of_pages for _ in range(PAGE_SIZE)))


def test_pages_found_in_any_order_are_one_chain() -> None:
    pages = page_refs(5)

    assert list(chains_of(*reversed(pages))) == [chain_of(pages)]


def test_branches_are_chains_of_their_own() -> None:
    long, left, right, other = branch(1, 2, 3, 4), branch(1, 2, 5), branch(1, 6), branch(7)

    found = list(chains_of(*long, left[2], right[1], *other))

    assert len(found) == 4
    for pages in (long, left, right, other):
        assert chain_of(pages) in found


def test_pages_without_their_parent_are_in_no_chain() -> None:
    pages = page_refs(5)

    assert list(chains_of(*pages[:2], *pages[3:])) == [chain_of(pages[:2])]
    assert list(chains_of(*pages[1:])) == []


def test_a_page_found_twice_counts_once() -> None:
    pages = page_refs(2)
    chains = chains_of(*pages)

    assert not chains.note(pages[1].key, header(pages[1]))

    assert list(chains) == [chain_of(pages)]


def test_a_page_that_claims_another_place_is_in_no_chain() -> None:
    pages = page_refs(2)
    wrong = PageRef(pages[1].key, pages[1].parent, 7, pages[1].tokens)

    assert list(chains_of(pages[0], wrong)) == [chain_of(pages[:1])]


@pytest.mark.parametrize(
    "noise", [b"", b"no header at all" * 40, bytes(header(page_refs(1)[0]))[:-1]]
)
def test_what_is_no_header_is_passed_over(noise: bytes) -> None:
    chains = Chains(CODEC, NAMESPACE)

    assert not chains.note(PageKey(bytes(32)), noise)


def test_another_format_version_is_passed_over() -> None:
    page = page_refs(1)[0]
    old = header(page)
    old[4:6] = struct.pack("<H", 2)
    old[8:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(old[16:]))

    assert not Chains(CODEC, NAMESPACE).note(page.key, old)


def test_a_chain_of_thousands_of_pages_is_no_recursion() -> None:
    pages = page_refs(3000)

    assert list(chains_of(*pages)) == [chain_of(pages)]


# ---------------------------------------------------------------- through the store


def test_a_scan_finds_what_was_stored_and_only_of_its_namespace() -> None:
    pages, others = page_refs(6), page_refs(3, namespace=OTHER_NAMESPACE)
    with World() as world:
        world.store_pages(pages)
        world.store.store(world.new_op(), OTHER_NAMESPACE, others, slots(100, 101, 102))
        world.store.describe(namespace())
        assert world.store.flush(20)

        world.store.scan(NAMESPACE)

        assert world.chains(1) == [chain_of(pages)]


def test_many_chains_are_drained_a_few_at_a_time() -> None:
    shared = branch(1, *range(100, 139))
    tails = [branch(1, *range(100, 139), token)[-1:] for token in range(2, 32)]
    with World() as world:
        world.store_pages(shared)
        for tail in tails:
            world.store_pages(tail)

        world.store.scan(NAMESPACE)
        world.wait_until(lambda: bool(world.drain()))

        assert len(world.events) < 30
        found = world.chains(30)
        assert {chain.keys[-1] for chain in found} == {tail[0].key for tail in tails}
        assert all(len(chain.keys) == 41 for chain in found)


def test_many_records_do_not_keep_the_loop_from_other_work() -> None:
    with World(num_pages=4096) as world:
        pages = page_refs(130)
        world.store_pages(pages)

        world.store.scan(NAMESPACE)
        world.store.scan(OTHER_NAMESPACE)

        assert world.chains(1) == [chain_of(pages)]


def test_a_scan_that_fails_half_way_gives_what_it_has_found() -> None:
    pages = page_refs(4)
    with World() as world:
        world.store_pages(pages)
        world.backend.next("scan", Fault(error=OSError(5, "disk")))
        world.store.scan(NAMESPACE)
        world.wait_until(lambda: "scan_OSError" in world.store.stats().errors)

        world.store.scan(NAMESPACE)

        assert world.chains(1) == [chain_of(pages)]


def test_scanned_records_that_are_cut_short_are_passed_over() -> None:
    with World() as world:
        world.store_pages(page_refs(4))
        world.backend.next("scan", Fault(tamper=truncate))
        world.store.scan(NAMESPACE)
        world.wait_until(lambda: world.backend.num_calls["scan"] == 1)

        assert world.probe_keys([]) == []
        assert world.drain() == []


def test_a_description_is_no_page() -> None:
    described = namespace()
    head, _ = encode_namespace(described.digest, described.descriptor, 0)

    assert not Chains(CODEC, described.digest).note(PageKey(described.digest), head)


def test_a_scan_that_is_not_over_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    with World() as world:
        world.backend.next("scan", Fault(before=gate))
        world.store.scan(NAMESPACE)
        gate.wait_until_reached()

    assert caplog.messages == []
    assert world.store.stats().errors == {}
