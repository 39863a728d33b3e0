"""What put, delete, touch, scan and stats change, and what they do not."""

from hicache.testing.checks.registry import check
from hicache.testing.expecting import expect, expect_that
from hicache.testing.records import Subject, key


@check
async def putting_a_key_again_is_accepted(store: Subject) -> None:
    """A key that is there counts as accepted, and stays one record."""
    await store.put("a")

    expect("what put returned", await store.put("a", "b"), [True, True])
    expect("record a", await store.read("a"), store.record("a"))
    expect("stats().num_records", (await store.backend.stats()).num_records, 2)


@check
async def the_source_may_change_once_put_has_returned(store: Subject) -> None:
    """The buffers given to put are borrowed: the page in them is another one soon."""
    source = store.source("a")
    await store.backend.put([(key("a"), [source])])

    source[:] = bytes(len(source))

    expect("the record", await store.read("a"), store.record("a"))


@check
async def a_deleted_record_is_absent_and_others_stay(store: Subject) -> None:
    """delete removes what it is asked to; a key that is absent, or there twice, is no error."""
    await store.put("a", "b", "c")

    await store.delete("b", "never put", "b")

    expect("what contains returned", await store.contains(*"abc"), [True, False, True])
    expect("record b", await store.read("b"), None)
    expect("record c", await store.read("c"), store.record("c"))


@check
async def a_deleted_record_can_be_put_again(store: Subject) -> None:
    """A record that was found damaged is deleted, and stored anew."""
    await store.put("a")
    await store.delete("a")

    expect("what put returned", await store.put("a"), [True])
    expect("the record", await store.read("a"), store.record("a"))


@check
async def contains_answers_in_order_and_for_duplicates(store: Subject) -> None:
    """contains returns one answer a key, in the order of the keys."""
    await store.put("a")

    expect("what contains returned", await store.contains(*"xaay"), [False, True, True, False])


@check
async def touch_changes_no_record(store: Subject) -> None:
    """touch counts records as used, and makes none of a key that is absent."""
    await store.put("a", "b")

    await store.backend.touch([key("b"), key("never put"), key("b")])

    expect("record b", await store.read("b"), store.record("b"))
    expect("what contains returned", await store.contains("never put"), [False])


@check
async def scan_yields_the_start_of_every_record(store: Subject) -> None:
    """After a restart the tree is built from what scan yields: each record once, no other."""
    names = range(300)
    for start in range(0, 300, 50):
        await store.put(*names[start : start + 50])
    await store.put("short", nbytes=10)
    await store.put("empty", nbytes=0)
    await store.delete(7)

    found = await store.scan(24)

    expected = {key(name): store.record(name)[:24] for name in names if name != 7}
    expected[key("short")], expected[key("empty")] = store.record("short", 10)[:24], b""
    seen = {name for name, _ in found}
    expect("records that scan left out", len(expected.keys() - seen), 0)
    expect("records that scan made up", len(seen - expected.keys()), 0)
    expect("times that scan yielded a record again", len(found) - len(seen), 0)
    for name, header in found:
        expect("the start of a record", header, expected[name])


@check
async def records_tell_what_scan_does_and_no_wrong_length(store: Subject) -> None:
    """records yields each record once; a length or a head that it gives is right."""
    await store.put("a", "b", nbytes=5000)
    await store.put("short", nbytes=10)

    found = [told async for told in store.backend.records(24)]

    sizes = {"a": 5000, "b": 5000, "short": 10}
    names = {key(name): name for name in sizes}
    expect("records that were told", sorted(told.key for told in found), sorted(names))
    for told in found:
        whole = store.record(names[told.key], sizes[names[told.key]])
        expect("the start of a record", told.head, whole[:24])
        if told.nbytes is not None:
            expect("the length of a record", told.nbytes, len(whole))
    expect("is_there, of a store that is open", store.backend.is_there(), True)


@check
async def stats_count_records_and_bytes(store: Subject) -> None:
    """stats says how many records there are, and at least the bytes that were put."""
    before = await store.backend.stats()
    await store.put("a", "b", nbytes=10_000)

    after = await store.backend.stats()

    expect("stats().num_records", (before.num_records, after.num_records), (0, 2))
    added = after.nbytes - before.nbytes
    expect_that(added >= 20_000, "bytes after 20,000 were put", "20,000 more, or above", added)

    await store.delete("a", "b")

    expect("stats().num_records when all is deleted", (await store.backend.stats()).num_records, 0)
