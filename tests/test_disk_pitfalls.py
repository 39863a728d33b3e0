"""Storage that lies: what has broken elsewhere, tried on both disk backends.

Each name is the row's of a list of such failures. Where a row is tried, with records here, with
pages in ``test_disk_pitfall_pages``; and where it is tried without a disk too:

=====  =====================================  ==================================================
row    what is done to it                     tests (``test_…`` left out)
=====  =====================================  ==================================================
R1     a record cut short                     disk_pitfalls; store_records
R2     a record cut to nothing, put again     disk_pitfalls; store_records
R3     another KV dtype                       disk_pitfall_pages; store_records, codec
R4     another model, a name alike            disk_pitfall_pages; store_records
R5     foreign files, another namespace       disk_pitfalls, disk_pitfall_pages
R6     a victim that cannot be deleted        disk_pitfalls
R7     one budget, several models             disk_processes
R8     one budget, several processes          disk_processes
R9     what a crash left behind               disk_processes
R10    a model name of 231 characters         disk_pitfalls, disk_pitfall_pages
R11    files deleted behind our back          disk_pitfalls, disk_pitfall_pages; store_records
R12    later pages without earlier ones       disk_pitfall_pages; store_records
R13    one flipped byte                       disk_pitfall_pages; codec
R14    another layout of equal size           disk_pitfall_pages; store_records
S1     other weights                          disk_pitfall_pages; store_records
S2     a restart                              disk_processes, disk_pitfall_pages
S3     kill -9                                torture_processes
S4     a full disk, quota, read-only, map     disk_pitfalls, disk_space, disk_processes
S5     raises, hangs, returns short           disk_pitfall_pages; store_faults, store_hangs
S6     a record that is being written         disk_processes, torture_processes
S7     keys of another process                disk_pitfall_pages; codec
S8     the same key, other tokens             disk_pitfall_pages; store_records, codec
S9     another tenant                         disk_pitfall_pages; store_records
S10    fields that run together               disk_pitfall_pages; store_records
=====  =====================================  ==================================================
"""

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hicache.codec import PageCodec
from hicache.errors import ConfigError, StorageError, StorageFull
from hicache.keys import NamespaceDigest, PageRef
from hicache.testing.conformance import key, put, read, record
from tests.disk_child import BACKENDS
from tests.disks import MIB, Disk, FakeClock

pytestmark = pytest.mark.anyio
KINDS = sorted(BACKENDS)
NBYTES = 50_000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return Disk(request.param, tmp_path / "store", FakeClock())


async def put_apart(disk: Disk, *names: str) -> None:
    """Put records so that none shares a file with another."""
    for name in names:
        async with disk.opened() as backend:
            await put(backend, name, nbytes=NBYTES)


async def read_all(disk: Disk, *names: str) -> list[bytes | None]:
    async with disk.opened() as backend:
        buffers = [memoryview(bytearray(NBYTES)) for _ in names]
        lengths = await backend.get([key(name) for name in names], [[one] for one in buffers])
    return [
        None if length is None else bytes(buffer[:length])
        for length, buffer in zip(lengths, buffers, strict=True)
    ]


def test_the_table_above_leaves_no_row_out_and_names_no_file_in_vain() -> None:
    rows = dict(re.findall(r"^([RS]\d+) .{40}(.*)$", __doc__ or "", re.MULTILINE))

    assert rows.keys() == {f"R{n}" for n in range(1, 15)} | {f"S{n}" for n in range(1, 11)}
    for row, files in rows.items():
        for file in re.findall(r"\w+", files):
            source = Path(__file__).with_name(f"test_{file}.py").read_text()
            assert re.search(rf"def test_(\w+_)?{row.lower()}_", source), (row, file)


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("left", [100, 0])
@pytest.mark.parametrize("is_open", [True, False])
async def test_r1_a_record_cut_short_is_absent_and_spoils_no_other(
    disk: Disk, left: int, is_open: bool
) -> None:
    await put_apart(disk, "a", "b", "c")
    path, offset = disk.find(record("b", NBYTES))
    if not is_open:
        os.truncate(path, offset + left)

    async with disk.opened() as backend:
        if is_open:
            os.truncate(path, offset + left)
        found = [await read(backend, name, NBYTES) for name in "abc"]

        assert found == [record("a", NBYTES), None, record("c", NBYTES)]
        assert await backend.contains([key(name) for name in "abc"]) == [True, False, True]
        assert (await backend.stats()).num_lost == 1
        assert await put(backend, "b", nbytes=NBYTES) == [True]
        assert await read(backend, "b", NBYTES) == record("b", NBYTES)


async def test_r1_a_batch_survives_one_bad_record(disk: Disk) -> None:
    await put_apart(disk, "a", "b", "c")
    path, offset = disk.find(record("b", NBYTES))
    os.truncate(path, offset + 100)

    found = await read_all(disk, "a", "b", "c")

    assert found == [record("a", NBYTES), None, record("c", NBYTES)]


async def test_r2_a_record_cut_to_nothing_is_written_again(disk: Disk) -> None:
    await put_apart(disk, "a", "b")
    path, _ = disk.find(record("b", NBYTES))
    async with disk.opened() as backend:
        os.truncate(path, 0)

        assert await put(backend, "b", nbytes=NBYTES) == [True]

        assert await read(backend, "b", NBYTES) == record("b", NBYTES)
        assert await read(backend, "a", NBYTES) == record("a", NBYTES)


async def test_a_frame_with_a_flipped_bit_costs_its_own_record_only(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", "b", "c", nbytes=NBYTES)
    path, offset = disk.find(record("b", NBYTES))
    content = bytearray(path.read_bytes())
    content[offset - 20] ^= 1
    path.write_bytes(content)

    found = await read_all(disk, "a", "b", "c")

    assert found == [record("a", NBYTES), None, record("c", NBYTES)]


async def test_r11_a_file_deleted_behind_our_back_is_a_miss_and_then_forgotten(
    disk: Disk,
) -> None:
    await put_apart(disk, "a", "b")
    path, _ = disk.find(record("b", NBYTES))
    async with disk.opened() as backend:
        assert await backend.contains([key("b")]) == [True]
        path.unlink()

        assert await read(backend, "b", NBYTES) is None

        assert await backend.contains([key("a"), key("b")]) == [True, False]
        assert await put(backend, "b", nbytes=NBYTES) == [True]
        assert await read(backend, "b", NBYTES) == record("b", NBYTES)


async def test_r11_what_is_put_after_a_file_was_deleted_is_kept(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)
        path, _ = disk.find(record("a", NBYTES))
        path.unlink()

        assert await put(backend, "b", nbytes=NBYTES) == [True]

        assert await read(backend, "b", NBYTES) == record("b", NBYTES)
    assert await read_all(disk, "b") == [record("b", NBYTES)]


# ---------------------------------------------------------------- whose directory it is


async def test_r5_foreign_files_are_left_alone(disk: Disk) -> None:
    disk.budget_nbytes = 4 * MIB
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)
    folders = {path.parent for path in disk.files()} | {disk.path}
    foreign = [folder / name for folder in folders for name in ("notes.txt", "ab")]
    for path in foreign:
        path.write_text("mine")

    async with disk.opened() as backend:
        for number in range(200):
            await put(backend, number, nbytes=NBYTES)
        found = {name async for name, _ in backend.scan(8)}
        await backend.delete(list(found))

    assert found <= {key("a"), *(key(number) for number in range(200))}
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)


async def test_r10_names_of_files_say_nothing_of_what_a_user_named(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "model-" + "x" * 231, nbytes=NBYTES)

        assert await read(backend, "model-" + "x" * 231, NBYTES) is not None

    assert not [path for path in disk.path.rglob("*") if "model" in path.name]
    assert max(len(path.name) for path in disk.path.rglob("*")) <= 64


async def test_files_are_for_their_owner_only(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)

    modes = {path.stat().st_mode & 0o777 for path in disk.files()}
    folders = {path.stat().st_mode & 0o777 for path in disk.path.rglob("*") if path.is_dir()}

    assert modes == {0o600}
    assert folders | {disk.path.stat().st_mode & 0o777} == {0o700}


async def test_a_store_of_another_version_is_treated_as_empty(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)
    (disk.path / "hicache-store").write_text(f"hicache {disk.kind} 0\n")

    async with disk.opened() as backend:
        assert await read(backend, "a", NBYTES) is None
        assert (await backend.stats()).num_records == 0
        await put(backend, "b", nbytes=NBYTES)

    assert len([line for line in caplog.messages if "another format" in line]) == 1
    assert await read_all(disk, "a", "b") == [None, record("b", NBYTES)]


async def test_a_store_of_another_kind_is_refused_and_kept(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)
    other = Disk(next(kind for kind in KINDS if kind != disk.kind), disk.path, disk.clock)

    with pytest.raises(StorageError, match=f"holds a store of kind {disk.kind}"):
        async with other.opened():
            raise AssertionError("it opened")

    assert await read_all(disk, "a") == [record("a", NBYTES)]


async def test_a_lost_format_file_loses_nothing(disk: Disk) -> None:
    await put_apart(disk, "a")
    (disk.path / "hicache-store").unlink()

    assert await read_all(disk, "a") == [record("a", NBYTES)]


@pytest.mark.parametrize("path", ["file/store", "/proc/store"])
async def test_a_directory_that_cannot_be_made_is_one_clear_error(
    disk: Disk, tmp_path: Path, path: str
) -> None:
    (tmp_path / "file").write_text("no directory")
    disk.path = tmp_path / path

    with pytest.raises(StorageError) as raised:
        async with disk.opened():
            raise AssertionError("it opened")

    assert str(disk.path) in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_a_budget_too_small_to_work_is_refused(disk: Disk) -> None:
    disk.budget_nbytes = 1000

    with pytest.raises(ConfigError, match="needs"):
        async with disk.opened():
            raise AssertionError("it opened")


async def test_a_directory_removed_under_us_costs_misses(disk: Disk) -> None:
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)
        shutil.rmtree(disk.path)

        for _ in range(3):
            with suppress(StorageError):
                await put(backend, "b", nbytes=NBYTES)

        assert await put(backend, "c", nbytes=NBYTES) == [True]
        assert await read(backend, "c", NBYTES) == record("c", NBYTES)
        assert await read(backend, "a", NBYTES) is None
    assert await read_all(disk, "a", "c") == [None, record("c", NBYTES)]


# ---------------------------------------------------------------- room


async def test_r6_a_victim_that_cannot_be_deleted_is_left_alone(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.budget_nbytes = 8 * MIB
    unlink = os.unlink
    async with disk.opened() as backend:
        await put(backend, "oldest", nbytes=NBYTES)
    stuck, _ = disk.find(record("oldest", NBYTES))

    def refuse(path: Any, **options: Any) -> None:
        if Path(path) == stuck:
            raise PermissionError(errno.EPERM, "no", str(path))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    disk.clock.now += 60
    async with disk.opened() as backend:
        accepted = [await put(backend, number, nbytes=NBYTES) for number in range(300)]

        assert accepted == [[True]] * 300
        assert stuck.exists()
        stats = await backend.stats()
        assert stats.num_evicted > 0
        assert stats.num_stuck > 0
    assert disk.nbytes() <= disk.budget_nbytes


async def test_tails_are_evicted_before_heads(disk: Disk) -> None:
    disk.budget_nbytes = 8 * MIB
    codec = PageCodec(4, NBYTES)
    namespace = NamespaceDigest(bytes(32))
    header, page = memoryview(bytearray(codec.header_nbytes)), memoryview(bytes(NBYTES))
    async with disk.opened() as backend:
        for number in range(200):
            ref = PageRef(key(number), bytes(32), number, bytes(16))
            codec.encode(header, page, ref, namespace, 0)
            await backend.put([(ref.key, [bytes(header), page])])

        held = await backend.contains([key(number) for number in range(200)])

    kept = [number for number, is_held in enumerate(held) if is_held]
    assert len(kept) < 200
    assert set(range(40)) <= set(kept)


async def test_what_was_used_lately_outlives_what_was_not(disk: Disk) -> None:
    disk.budget_nbytes = 8 * MIB
    hot = [f"hot {number}" for number in range(8)]
    async with disk.opened() as backend:
        await put(backend, *hot, nbytes=NBYTES)
        for number in range(400):
            disk.clock.now += 60
            await backend.touch([key(name) for name in hot])
            await put(backend, number, nbytes=NBYTES)

        assert await backend.contains([key(name) for name in hot]) == [True] * 8
        assert await read(backend, hot[3], NBYTES) == record(hot[3], NBYTES)
        assert (await backend.stats()).num_evicted > 250


async def test_a_smaller_budget_is_kept_after_a_restart(disk: Disk) -> None:
    async with disk.opened() as backend:
        for number in range(100):
            await put(backend, number, nbytes=NBYTES)
    disk.budget_nbytes = 4 * MIB

    async with disk.opened() as backend:
        for number in range(100, 110):
            await put(backend, number, nbytes=NBYTES)

        assert await read(backend, 109, NBYTES) == record(109, NBYTES)
    assert disk.nbytes() <= disk.budget_nbytes


async def test_a_record_larger_than_the_store_is_not_accepted(disk: Disk) -> None:
    disk.budget_nbytes = 4 * MIB
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)

        assert await put(backend, "huge", nbytes=5 * MIB) == [False]

        assert await read(backend, "a", NBYTES) == record("a", NBYTES)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
async def test_s4_a_full_disk_costs_stores_and_leaves_no_halves(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    pwritev = os.pwritev
    async with disk.opened() as backend:
        await put(backend, "a", nbytes=NBYTES)
        before = disk.nbytes()

        def half(fd: int, buffers: Any, offset: int, *flags: Any) -> int:
            pwritev(fd, [memoryview(buffers[-1]).cast("B")[: NBYTES // 2]], offset)
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", half)
            with pytest.raises(StorageFull):
                await put(backend, "b", "c", nbytes=NBYTES)

            assert disk.nbytes() < before + NBYTES // 2
            assert await backend.contains([key("b"), key("c")]) == [False, False]
            assert await read(backend, "a", NBYTES) == record("a", NBYTES)

        assert await put(backend, "b", "c", nbytes=NBYTES) == [True, True]
        assert await read(backend, "c", NBYTES) == record("c", NBYTES)
