"""What a batch gives: its order, its duplicates, and buffers that fit or do not."""

from collections.abc import Sequence

from typing_extensions import Buffer

from hicache.keys import PageKey
from hicache.storage import CONTRACT_VERSION
from hicache.testing.checks.registry import check
from hicache.testing.expecting import expect, expect_that
from hicache.testing.records import Subject, key

LARGE_NBYTES = 9 * 1024 * 1024


@check
async def it_speaks_this_version_of_the_contract(store: Subject) -> None:
    """contract_version is the one of this HiCache; max_batch and alignment are 1 or more."""
    backend = store.backend
    expect("contract_version", backend.contract_version, CONTRACT_VERSION)
    expect_that(backend.max_batch >= 1, "max_batch", "1 or more", backend.max_batch)
    expect_that(backend.alignment >= 1, "alignment", "1 or more", backend.alignment)


@check
async def a_missing_key_is_none_and_no_error(store: Subject) -> None:
    """Absence is no failure: get returns None and contains returns False."""
    expect("what get returned", await store.get("never put"), [None])
    expect("what contains returned", await store.contains("never put"), [False])


@check
async def a_record_comes_back(store: Subject) -> None:
    """put returns True for a record that it accepts, and get returns its bytes."""
    expect("what put returned", await store.put("a"), [True])
    expect("the record", await store.read("a"), store.record("a"))


@check
async def values_come_back_in_the_order_asked(store: Subject) -> None:
    """get returns one length a key, in the order of the keys, with None where one is absent."""
    await store.put("a", "b")

    found = await store.get("b", "x", "a")

    expect("records b, x, a", found, [store.record("b"), None, store.record("a")])


@check
async def a_key_asked_twice_in_a_batch_is_read_twice(store: Subject) -> None:
    """Each place of a batch has buffers of its own, also where its key is there already."""
    await store.put("a", "b")

    found = await store.get("a", "b", "a")

    expect("records a, b, a", found, [store.record(name) for name in "aba"])


@check
async def a_key_put_twice_in_a_batch_is_one_record(store: Subject) -> None:
    """The second of two equal keys in one put counts as accepted, and as no other record."""
    expect("what put returned", await store.put("a", "b", "a"), [True, True, True])
    expect("record a", await store.read("a"), store.record("a"))
    expect("stats().num_records", (await store.backend.stats()).num_records, 2)


@check
async def a_record_is_the_concatenation_of_its_buffers(store: Subject) -> None:
    """put is given a record in parts, some of them empty, of any type that has a buffer."""
    unit = store.backend.alignment
    source = store.source("a", 13 * unit)
    parts: Sequence[Buffer] = [
        source[: 2 * unit], source[:0], source[2 * unit : 3 * unit], source[3 * unit :],
    ]  # fmt: skip
    if unit == 1:
        parts = [bytes(parts[0]), bytearray(), *parts[2:]]

    await store.backend.put([(key("a"), parts)])

    expect("the record", await store.read("a", 13 * unit), bytes(source))


@check
async def a_record_is_scattered_over_its_buffers(store: Subject) -> None:
    """get fills the buffers of a key one after the other: the header's, then the page's."""
    await store.put("a", nbytes=3 * 4096)
    buffers = [store.buffer(4096), store.buffer(0), store.buffer(8192)]

    lengths = await store.backend.get([key("a")], [buffers])

    expect("what get returned", lengths, [store.nbytes(3 * 4096)])
    expect("the buffers, joined", b"".join(buffers), store.record("a", 3 * 4096))


@check
async def a_record_may_be_shorter_than_its_buffers(store: Subject) -> None:
    """get returns the record's own length; the rest of the buffers does not count."""
    await store.put("a", "b", nbytes=5000)
    buffers = [store.buffer(4096) for _ in range(3)]
    other = store.buffer(5000)

    lengths = await store.backend.get([key("a"), key("b")], [buffers, [other]])

    size = store.nbytes(5000)
    expect("what get returned", lengths, [size, size])
    expect("record a", b"".join(buffers)[:size], store.record("a", 5000))
    expect("record b", bytes(other), store.record("b", 5000))


@check
async def a_record_longer_than_its_buffers_fills_them(store: Subject) -> None:
    """get returns the true length where the buffers are too short, and writes nothing beyond."""
    await store.put("a", "b", nbytes=5000)
    short, other = store.buffer(4096), store.buffer(5000)

    lengths = await store.backend.get([key("a"), key("b")], [[short], [other]])

    size = store.nbytes(5000)
    expect("what get returned", lengths, [size, size])
    expect("the short buffer", bytes(short), store.record("a", 5000)[: len(short)])
    expect("record b", bytes(other), store.record("b", 5000))


@check
async def empty_batches_do_nothing(store: Subject) -> None:
    """Every method accepts a batch of no keys."""
    backend = store.backend
    expect("what get returned", await backend.get([], []), [])
    expect("what put returned", await backend.put([]), [])
    expect("what contains returned", await backend.contains([]), [])
    await backend.delete([])
    await backend.touch([])


@check
async def an_empty_record_is_a_record(store: Subject) -> None:
    """A record of no bytes is there, and of length 0: that is not absence."""
    expect("what put returned", await store.put("a", nbytes=0), [True])
    expect("what contains returned", await store.contains("a"), [True])
    expect("the record", await store.read("a", nbytes=0), b"")


@check
async def a_large_record_comes_back_whole(store: Subject) -> None:
    """A page may have many MiB."""
    expect("what put returned", await store.put("large", nbytes=LARGE_NBYTES), [True])
    expected = store.record("large", LARGE_NBYTES)
    expect("the record", await store.read("large", LARGE_NBYTES), expected)


@check
async def a_batch_may_have_max_batch_keys(store: Subject) -> None:
    """PageStore fills batches up to max_batch."""
    names = range(min(store.backend.max_batch, 1024))

    expect("what put returned", await store.put(*names, nbytes=4096), [True] * len(names))
    found = await store.get(*names, nbytes=4096)
    keys: Sequence[PageKey] = [key(name) for name in names]

    expect("the records", found, [store.record(name, 4096) for name in names])
    expect("what contains returned", await store.backend.contains(keys), [True] * len(names))
