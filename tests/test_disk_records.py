"""What the disk backends tell those who look at a store: every record, also a damaged one."""

import os
from pathlib import Path

import pytest

from hicache.errors import StorageError
from hicache.storage import StorageBackend, StoredRecord
from hicache.testing.conformance import key, put, record
from tests.disk_child import BACKENDS
from tests.disks import Disk, FakeClock

pytestmark = pytest.mark.anyio
NBYTES = 5_000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=sorted(BACKENDS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return Disk(request.param, tmp_path / "store", FakeClock())


async def listed(backend: StorageBackend) -> dict[bytes, StoredRecord]:
    return {bytes(one.key): one async for one in backend.records(20)}


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


async def test_records_come_with_their_length_and_the_minute_of_their_last_use(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", "b", nbytes=NBYTES)
        disk.clock.now += 600
        await backend.touch([key("b")])

        found = await listed(backend)

    minute = disk.clock.now // 60 * 60
    assert found == {
        key("a"): StoredRecord(key("a"), record("a", NBYTES)[:20], NBYTES, minute - 600),
        key("b"): StoredRecord(key("b"), record("b", NBYTES)[:20], NBYTES, minute),
    }


async def test_a_damaged_record_is_listed_without_a_head_and_listing_changes_nothing(
    disk: Disk,
) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", "b", "c", nbytes=NBYTES)
        path, offset = disk.find(record("b", NBYTES))
        flip(path, offset - 20)

        for _ in range(2):
            found = await listed(backend)
            assert found.keys() == {key("a"), key("b"), key("c")}
            assert [found[key(name)].head is None for name in "abc"] == [False, True, False]
        assert (await backend.stats()).num_lost == 0
        assert {name async for name, _ in backend.scan(20)} == {key("a"), key("c")}


async def test_a_record_whose_end_is_cut_off_is_listed_without_a_head(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)
        path, offset = disk.find(record("a", NBYTES))
        os.truncate(path, offset + NBYTES - 1)

        assert (await listed(backend))[key("a")].head is None


async def test_a_store_is_there_once_it_was_made_and_looking_does_not_make_it(disk: Disk) -> None:
    made = BACKENDS[disk.kind](disk.path, disk.budget_nbytes)
    assert not made.is_there()
    assert not disk.path.exists()

    async with disk.opened():
        assert made.is_there()


@pytest.mark.parametrize(
    ("line", "why"),
    [("hicache other 1\n", "holds a store of kind other"), ("hicache {} 0\n", "another format")],
)
async def test_a_store_that_opening_would_empty_or_refuse_is_named(
    disk: Disk, line: str, why: str
) -> None:
    disk.path.mkdir()
    (disk.path / "hicache-store").write_text(line.format(disk.kind))

    with pytest.raises(StorageError, match=why):
        BACKENDS[disk.kind](disk.path, disk.budget_nbytes).is_there()


async def test_a_record_whose_file_has_gone_is_no_damaged_one(disk: Disk) -> None:
    """So it is while a segment is evicted: the file goes first."""
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)
        path, _ = disk.find(record("a", NBYTES))
        path.unlink()

        assert await listed(backend) == {}
