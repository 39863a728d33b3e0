"""A budget that is kept, whatever is put. For backends that evict by themselves."""

from contextlib import suppress

from hicache.errors import StorageFull
from hicache.testing.checks.registry import check_bounded
from hicache.testing.expecting import expect, expect_that
from hicache.testing.records import Subject, key

BUDGET_NBYTES = 8 * 1024 * 1024


@check_bounded
async def a_budget_holds_however_much_is_put(store: Subject) -> None:
    """After each put the bytes are within the budget, and what was put last is there."""
    nbytes, most = 128 * 1024, 0
    for start in range(0, 320, 8):
        with suppress(StorageFull):
            await store.put(*range(start, start + 8), nbytes=nbytes)
        most = max(most, (await store.backend.stats()).nbytes)

    num_records = (await store.backend.stats()).num_records

    expect_that(most <= BUDGET_NBYTES, "the most bytes there were", "8 MiB, the budget", most)
    # A quarter of the budget, at least, is to hold records.
    expect_that(num_records >= 16, "records of 128 KiB at the end", "16 or more", num_records)
    expect("the record put last", await store.read(319, nbytes), store.record(319, nbytes))


@check_bounded
async def eviction_leaves_records_whole_or_absent(store: Subject) -> None:
    """What is evicted is gone, and counted; what is left, used or not, is whole."""
    nbytes, names = 64 * 1024, range(320)
    await store.put("kept", nbytes=nbytes)
    for start in range(0, 320, 8):
        with suppress(StorageFull):
            await store.put(*names[start : start + 8], nbytes=nbytes)
        await store.backend.touch([key("kept")])

    num_there = 0
    for name in ("kept", *names):
        found = await store.read(name, nbytes)
        if found is not None:
            expect(f"record {name}", found, store.record(name, nbytes))
            num_there += 1
    stats = await store.backend.stats()
    expect_that(stats.num_evicted > 0, "stats().num_evicted", "more than 0", stats.num_evicted)
    expect("stats().num_records", stats.num_records, num_there)
