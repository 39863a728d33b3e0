"""What is there when the store is opened anew."""

from hicache.testing.checks.registry import check_reopened
from hicache.testing.expecting import expect
from hicache.testing.records import Subject, key


@check_reopened
async def records_outlive_the_process(store: Subject) -> None:
    """What was put is there after close and open, and what was deleted is not."""
    nbytes = 70_000
    await store.put("a", "b", "c", nbytes=nbytes)
    await store.delete("b")

    await store.reopen()

    records = [store.record("a", nbytes), None, store.record("c", nbytes)]
    expect("records a, b, c", await store.get("a", "b", "c", nbytes=nbytes), records)
    expect("what contains returned", await store.contains(*"abc"), [True, False, True])
    seen = {name for name, _ in await store.scan(8)}
    expect("whether scan finds a and c alone", seen == {key("a"), key("c")}, True)
    expect("stats().num_records", (await store.backend.stats()).num_records, 2)


@check_reopened
async def a_store_that_was_opened_anew_can_be_written(store: Subject) -> None:
    """What is put after a restart is there after the next one."""
    await store.put("a")
    await store.reopen()
    expect("what put returned", await store.put("b"), [True])

    await store.reopen()

    found = await store.get("a", "b")
    expect("records a, b", found, [store.record("a"), store.record("b")])


@check_reopened
async def an_empty_store_opens_again(store: Subject) -> None:
    """A server may start and end without storing a page."""
    await store.reopen()

    expect("what scan yields", await store.scan(8), [])
    expect("what put returned", await store.put("a"), [True])
