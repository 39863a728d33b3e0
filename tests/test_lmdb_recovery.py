"""The lmdb backend's index may be lost or damaged at any time: the segments know it all."""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from hicache.errors import StorageError
from hicache.testing.conformance import key, put, read, record
from tests.disks import MIB, Disk, FakeClock

pytestmark = pytest.mark.anyio
NAMES = [f"record {number}" for number in range(300)]
NBYTES = 3000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk("lmdb", tmp_path / "store", FakeClock())


async def fill(disk: Disk) -> None:
    async with disk.opened() as backend:
        for start in range(0, len(NAMES), 30):
            await put(backend, *NAMES[start : start + 30], nbytes=NBYTES)


async def check(disk: Disk) -> None:
    async with disk.opened() as backend:
        assert (await backend.stats()).num_records == len(NAMES)
        for name in NAMES:
            assert await read(backend, name, NBYTES) == record(name, NBYTES)
        assert {name async for name, _ in backend.scan(8)} == {key(name) for name in NAMES}


def lose(index: Path) -> None:
    index.unlink()


def empty(index: Path) -> None:
    os.truncate(index, 0)


def halve(index: Path) -> None:
    os.truncate(index, index.stat().st_size // 2 // 4096 * 4096)


def keep_meta(index: Path) -> None:
    os.truncate(index, 2 * 4096)


def zero_meta(index: Path) -> None:
    with open(index, "r+b") as file:
        file.write(bytes(2 * 4096))


def zero_tree(index: Path) -> None:
    with open(index, "r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(index.stat().st_size - 2 * 4096))


def scramble(index: Path) -> None:
    index.write_bytes(Random(0).randbytes(index.stat().st_size))


def replace(index: Path) -> None:
    index.write_text("this is no database\n" * 1000)


@pytest.mark.parametrize(
    "damage",
    [lose, empty, halve, keep_meta, zero_meta, zero_tree, scramble, replace],
    ids=lambda damage: str(damage.__name__),
)
async def test_a_damaged_index_is_made_again(disk: Disk, damage: Callable[[Path], None]) -> None:
    await fill(disk)

    damage(disk.path / "index")

    await check(disk)


async def test_no_flipped_bit_of_the_index_costs_more_than_records(disk: Disk) -> None:
    """Whatever a bit turns into, the process lives and no record is wrong."""
    await fill(disk)
    index = disk.path / "index"
    good = index.read_bytes()
    random = Random(5)
    for _ in range(60):
        bad = bytearray(good)
        for _ in range(random.choice([1, 1, 20])):
            bad[random.randrange(len(bad))] ^= 1 << random.randrange(8)
        index.write_bytes(bad)

        async with disk.opened() as backend:
            for name in NAMES[::17]:
                assert await read(backend, name, NBYTES) in (None, record(name, NBYTES))
            await put(backend, *NAMES[:3], nbytes=NBYTES)
            assert await read(backend, NAMES[0], NBYTES) == record(NAMES[0], NBYTES)


async def test_an_older_index_finds_what_was_written_since(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, *NAMES[:100], nbytes=NBYTES)
    older = (disk.path / "index").read_bytes()
    async with disk.opened() as backend:
        await put(backend, *NAMES[100:], nbytes=NBYTES)

    (disk.path / "index").write_bytes(older)

    await check(disk)


async def test_a_deleted_record_does_not_come_back_with_a_new_index(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", "b", "c", nbytes=NBYTES)
        await backend.delete([key("b")])

    (disk.path / "index").unlink()

    async with disk.opened() as backend:
        assert await backend.contains([key(name) for name in "abc"]) == [True, False, True]


async def test_what_lies_behind_damage_in_a_segment_is_found_again(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", "b", "c", nbytes=100_000)
    path, offset = disk.find(record("b", 100_000))
    with open(path, "r+b") as file:
        file.seek(offset - 64)
        file.write(bytes(64))

    (disk.path / "index").unlink()

    async with disk.opened() as backend:
        assert await backend.contains([key(name) for name in "abc"]) == [True, False, True]
        assert await read(backend, "c", 100_000) == record("c", 100_000)


async def test_a_frame_inside_a_payload_is_no_record(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "inner", nbytes=NBYTES)
    path, offset = disk.find(record("inner", NBYTES))
    with open(path, "rb") as file:
        file.seek(offset - 64)
        stolen = file.read(64 + NBYTES)
    other = Disk("lmdb", disk.path.with_name("other"), disk.clock)
    async with other.opened() as backend:
        await backend.put([(key("outer"), [stolen])])
    outer, offset = other.find(stolen)
    with open(outer, "r+b") as file:
        file.seek(offset - 64)
        file.write(bytes(64))

    (other.path / "index").unlink()

    async with other.opened() as backend:
        assert await backend.contains([key("inner"), key("outer")]) == [False, False]


async def test_an_index_cut_short_while_in_use_costs_errors_and_then_works(disk: Disk) -> None:
    await fill(disk)
    async with disk.opened() as backend:
        await read(backend, NAMES[0], NBYTES)
        os.truncate(disk.path / "index", 4096)

        with pytest.raises(StorageError):
            await read(backend, NAMES[1], NBYTES)

        assert await read(backend, NAMES[2], NBYTES) == record(NAMES[2], NBYTES)


async def test_two_backends_of_one_process_are_refused_clearly(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)

        with pytest.raises(StorageError, match="already open in this process"):
            async with disk.opened():
                raise AssertionError("it opened")

        assert await read(backend, "a", NBYTES) == record("a", NBYTES)


async def test_very_many_small_records_do_not_fill_the_index(disk: Disk) -> None:
    disk.budget_nbytes = 4 * MIB
    async with disk.opened() as backend:
        for start in range(0, 12_000, 120):
            names = range(start, start + 120)
            assert all(await backend.put([(key(name), [b"x"]) for name in names]))

        stats = await backend.stats()

        assert stats.num_evicted > 0
        assert stats.num_records > 2000
        assert await backend.contains([key(11_999)]) == [True]
    assert disk.nbytes() <= disk.budget_nbytes


async def test_a_segment_that_is_all_deleted_gives_its_room_back(disk: Disk) -> None:
    async with disk.opened() as backend:
        before = disk.nbytes()
        for start in range(0, 300, 30):
            await put(backend, *NAMES[start : start + 30], nbytes=100_000)
        assert disk.nbytes() > 300 * 100_000

        for start in range(0, 300, 30):
            await backend.delete([key(name) for name in NAMES[start : start + 30]])

        assert disk.nbytes() < before + 3 * MIB
