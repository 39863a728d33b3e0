"""What every ``StorageBackend`` must do, as tests that its author inherits.

::

    class TestMyBackend(BackendTests):
        @pytest.fixture
        async def backend(self, tmp_path: Path) -> AsyncIterator[StorageBackend]:
            async with MyBackend(tmp_path) as backend:
                yield backend

Override ``backend``; and ``reopen`` where records outlive the process, ``bounded`` where the
backend keeps to a budget. Tests of what was not overridden are skipped. The tests are async, by
anyio's pytest plugin.
"""

import asyncio
import ctypes
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random

import pytest
from typing_extensions import Buffer

from hicache.errors import StorageFull
from hicache.keys import PageKey
from hicache.storage import CONTRACT_VERSION, StorageBackend

Reopen = Callable[[], Awaitable[StorageBackend]]

LARGE_NBYTES = 9 * 1024 * 1024
_FILL = 0xA5


def key(name: object) -> PageKey:
    """Return the key that stands for a name."""
    return PageKey(hashlib.sha256(repr(name).encode()).digest())


def record(name: object, nbytes: int = 100) -> bytes:
    """Return bytes that are different for each name, and the same each time."""
    return Random(repr(name)).randbytes(nbytes)


def buffer_for(backend: StorageBackend, nbytes: int) -> memoryview:
    """Return a buffer filled with a marker, at an address that the backend accepts."""
    spare = bytearray([_FILL]) * (nbytes + backend.alignment)
    address = ctypes.addressof(ctypes.c_char.from_buffer(spare))
    start = -address % backend.alignment
    return memoryview(spare)[start : start + nbytes]


async def read(backend: StorageBackend, name: object, nbytes: int = 100) -> bytes | None:
    """Return a record of at most ``nbytes`` bytes; ``None`` where it is absent."""
    buffer = buffer_for(backend, nbytes)
    (length,) = await backend.get([key(name)], [[buffer]])
    return None if length is None else bytes(buffer[:length])


async def put(backend: StorageBackend, *names: object, nbytes: int = 100) -> list[bool]:
    """Store a record for each name."""
    return await backend.put([(key(name), [record(name, nbytes)]) for name in names])


class BackendTests:
    """The contract. Override ``backend``, and ``reopen`` and ``bounded`` where they apply."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    async def backend(self) -> StorageBackend:
        """An open, empty backend with room for 64 MiB at least."""
        raise NotImplementedError("provide a fixture that returns an open, empty backend")

    @pytest.fixture
    async def reopen(self, backend: StorageBackend) -> Reopen:
        """A function that closes ``backend`` and opens its store anew."""
        pytest.skip("records do not outlive this backend")

    @pytest.fixture
    async def bounded(self) -> StorageBackend:
        """An open, empty backend with a budget of 8 MiB."""
        pytest.skip("this backend is not said to keep to a budget")

    async def test_speaks_this_version_of_the_contract(self, backend: StorageBackend) -> None:
        assert backend.contract_version == CONTRACT_VERSION
        assert backend.max_batch >= 1
        assert backend.alignment >= 1

    async def test_values_come_back_in_the_order_asked(self, backend: StorageBackend) -> None:
        await put(backend, "a", "b")
        buffers = [buffer_for(backend, 100) for _ in range(3)]

        lengths = await backend.get(
            [key("b"), key("x"), key("a")], [[buffer] for buffer in buffers]
        )

        assert lengths == [100, None, 100]
        assert bytes(buffers[0]) == record("b")
        assert bytes(buffers[2]) == record("a")

    async def test_a_missing_key_is_none_and_no_error(self, backend: StorageBackend) -> None:
        assert await read(backend, "never put") is None
        assert await backend.contains([key("never put")]) == [False]

    async def test_a_key_asked_twice_in_a_batch_is_read_twice(
        self, backend: StorageBackend
    ) -> None:
        await put(backend, "a", "b")
        buffers = [buffer_for(backend, 100) for _ in range(3)]

        lengths = await backend.get(
            [key("a"), key("b"), key("a")], [[buffer] for buffer in buffers]
        )

        assert lengths == [100, 100, 100]
        assert bytes(buffers[0]) == bytes(buffers[2]) == record("a")

    async def test_a_key_put_twice_in_a_batch_is_one_record(self, backend: StorageBackend) -> None:
        assert await put(backend, "a", "b", "a") == [True, True, True]

        assert await read(backend, "a") == record("a")
        assert (await backend.stats()).num_records == 2

    async def test_a_record_is_the_concatenation_of_its_buffers(
        self, backend: StorageBackend
    ) -> None:
        parts: Sequence[Buffer] = [b"head", bytearray(b""), memoryview(b"er"), b"page" * 10]

        await backend.put([(key("a"), parts)])

        assert await read(backend, "a") == b"header" + b"page" * 10

    async def test_a_record_is_scattered_over_its_buffers(self, backend: StorageBackend) -> None:
        await backend.put([(key("a"), [record("a", 3 * 4096)])])
        buffers = [buffer_for(backend, 4096) for _ in range(3)]

        assert await backend.get([key("a")], [buffers]) == [3 * 4096]

        assert b"".join(buffers) == record("a", 3 * 4096)

    async def test_a_record_may_be_shorter_than_its_buffers(self, backend: StorageBackend) -> None:
        await put(backend, "a", "b", nbytes=5000)
        buffers = [buffer_for(backend, 4096) for _ in range(3)]
        other = buffer_for(backend, 5000)

        lengths = await backend.get([key("a"), key("b")], [buffers, [other]])

        assert lengths == [5000, 5000]
        assert b"".join(buffers)[:5000] == record("a", 5000)
        assert bytes(other) == record("b", 5000)

    async def test_a_record_longer_than_its_buffers_fills_them(
        self, backend: StorageBackend
    ) -> None:
        await put(backend, "a", "b", nbytes=5000)
        short, other = buffer_for(backend, 4096), buffer_for(backend, 5000)

        lengths = await backend.get([key("a"), key("b")], [[short], [other]])

        assert lengths == [5000, 5000]
        assert bytes(short) == record("a", 5000)[:4096]
        assert bytes(other) == record("b", 5000)

    async def test_empty_batches_do_nothing(self, backend: StorageBackend) -> None:
        assert await backend.get([], []) == []
        assert await backend.put([]) == []
        assert await backend.contains([]) == []
        await backend.delete([])
        await backend.touch([])

    async def test_a_large_record_comes_back_whole(self, backend: StorageBackend) -> None:
        assert await put(backend, "large", nbytes=LARGE_NBYTES) == [True]

        assert await read(backend, "large", LARGE_NBYTES) == record("large", LARGE_NBYTES)

    async def test_a_batch_may_have_max_batch_keys(self, backend: StorageBackend) -> None:
        names = range(min(backend.max_batch, 1024))
        buffers = [buffer_for(backend, 4096) for _ in names]

        accepted = await put(backend, *names, nbytes=4096)
        lengths = await backend.get([key(name) for name in names], [[one] for one in buffers])

        assert accepted == [True] * len(names)
        assert lengths == [4096] * len(names)
        assert [bytes(one) for one in buffers] == [record(name, 4096) for name in names]

    async def test_putting_a_key_again_is_accepted(self, backend: StorageBackend) -> None:
        await put(backend, "a")

        assert await put(backend, "a", "b") == [True, True]

        assert await read(backend, "a") == record("a")
        assert (await backend.stats()).num_records == 2

    async def test_the_source_may_change_once_put_has_returned(
        self, backend: StorageBackend
    ) -> None:
        source = bytearray(record("a"))
        await backend.put([(key("a"), [source])])

        source[:] = bytes(len(source))

        assert await read(backend, "a") == record("a")

    async def test_a_deleted_record_is_absent_and_others_stay(
        self, backend: StorageBackend
    ) -> None:
        await put(backend, "a", "b", "c")

        await backend.delete([key("b"), key("never put"), key("b")])

        assert await backend.contains([key(name) for name in "abc"]) == [True, False, True]
        assert await read(backend, "b") is None
        assert await read(backend, "c") == record("c")

    async def test_a_deleted_record_can_be_put_again(self, backend: StorageBackend) -> None:
        await put(backend, "a")
        await backend.delete([key("a")])

        assert await put(backend, "a") == [True]

        assert await read(backend, "a") == record("a")

    async def test_contains_answers_in_order_and_for_duplicates(
        self, backend: StorageBackend
    ) -> None:
        await put(backend, "a")

        found = await backend.contains([key("x"), key("a"), key("a"), key("y")])

        assert found == [False, True, True, False]

    async def test_touch_changes_no_record(self, backend: StorageBackend) -> None:
        await put(backend, "a", "b")

        await backend.touch([key("b"), key("never put"), key("b")])

        assert await read(backend, "b") == record("b")
        assert await backend.contains([key("never put")]) == [False]

    async def test_scan_yields_the_start_of_every_record(self, backend: StorageBackend) -> None:
        names = range(300)
        for start in range(0, 300, 50):
            await put(backend, *names[start : start + 50])
        await put(backend, "short", nbytes=10)
        await backend.delete([key(7)])

        found = {name: bytes(header) async for name, header in backend.scan(24)}

        expected = {key(name): record(name)[:24] for name in names if name != 7}
        assert found == {**expected, key("short"): record("short", 10)}

    async def test_stats_count_records_and_bytes(self, backend: StorageBackend) -> None:
        before = await backend.stats()
        await put(backend, "a", "b", nbytes=10_000)

        after = await backend.stats()

        assert (before.num_records, after.num_records) == (0, 2)
        assert after.nbytes >= before.nbytes + 20_000

    async def test_concurrent_calls_see_records_whole_or_absent(
        self, backend: StorageBackend
    ) -> None:
        nbytes, names = 40_000, range(6)
        wrong: list[object] = []

        async def write(random: Random) -> None:
            for _ in range(30):
                chosen = random.sample(names, 3)
                if random.random() < 0.5:
                    await put(backend, *chosen, nbytes=nbytes)
                else:
                    await backend.delete([key(name) for name in chosen])

        async def check(random: Random) -> None:
            for _ in range(60):
                chosen = random.sample(names, 3)
                buffers = [buffer_for(backend, nbytes) for _ in chosen]
                lengths = await backend.get(
                    [key(name) for name in chosen], [[one] for one in buffers]
                )
                for name, length, buffer in zip(chosen, lengths, buffers, strict=True):
                    if length is not None and bytes(buffer) != record(name, nbytes):
                        wrong.append(name)

        async with asyncio.TaskGroup() as tasks:
            for seed in range(3):
                tasks.create_task(write(Random(seed)))
                tasks.create_task(check(Random(seed)))

        assert wrong == []

    async def test_a_cancelled_get_has_let_go_of_its_buffers(self, backend: StorageBackend) -> None:
        nbytes, names = 256 * 1024, range(16)
        await put(backend, *names, nbytes=nbytes)
        buffers = [buffer_for(backend, nbytes) for _ in names]
        for num_turns in range(6):
            call = asyncio.ensure_future(
                backend.get([key(name) for name in names], [[one] for one in buffers])
            )
            for _ in range(num_turns):
                await asyncio.sleep(0)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            for buffer in buffers:
                buffer[:] = bytes(nbytes)

            await read(backend, 0, nbytes)  # time for whoever still writes

            assert not any(any(buffer[::4096]) for buffer in buffers)

    async def test_a_cancelled_put_leaves_records_whole_or_absent(
        self, backend: StorageBackend
    ) -> None:
        nbytes, names = 256 * 1024, range(16)
        for num_turns in range(6):
            sources = [bytearray(record(name, nbytes)) for name in names]
            call = asyncio.ensure_future(
                backend.put([(key(name), [one]) for name, one in zip(names, sources, strict=True)])
            )
            for _ in range(num_turns):
                await asyncio.sleep(0)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            for source in sources:
                source[:] = bytes(nbytes)

            for name in names:
                assert await read(backend, name, nbytes) in (None, record(name, nbytes))
            await backend.delete([key(name) for name in names])

    async def test_records_outlive_the_process(
        self, backend: StorageBackend, reopen: Reopen
    ) -> None:
        await put(backend, "a", "b", "c", nbytes=70_000)
        await backend.delete([key("b")])

        backend = await reopen()

        assert await read(backend, "a", 70_000) == record("a", 70_000)
        assert await read(backend, "b", 70_000) is None
        assert await read(backend, "c", 70_000) == record("c", 70_000)
        assert {name async for name, _ in backend.scan(8)} == {key("a"), key("c")}
        assert await put(backend, "b", nbytes=70_000) == [True]
        assert await read(backend, "b", 70_000) == record("b", 70_000)

    async def test_closing_twice_is_harmless(self, backend: StorageBackend) -> None:
        await backend.close()
        await backend.close()

    async def test_a_budget_holds_however_much_is_put(self, bounded: StorageBackend) -> None:
        nbytes = 128 * 1024
        most = 0
        for start in range(0, 320, 8):
            with suppress(StorageFull):
                await put(bounded, *range(start, start + 8), nbytes=nbytes)
            most = max(most, (await bounded.stats()).nbytes)

        stats = await bounded.stats()
        newest = await read(bounded, 319, nbytes)

        assert most <= 8 * 1024 * 1024
        assert stats.num_records >= 16  # a quarter of the budget, at least, holds records
        assert newest == record(319, nbytes)

    async def test_a_budget_spares_what_is_in_use(self, bounded: StorageBackend) -> None:
        nbytes = 64 * 1024
        await put(bounded, "kept", nbytes=nbytes)
        for start in range(0, 320, 8):
            await put(bounded, *range(start, start + 8), nbytes=nbytes)
            await bounded.touch([key("kept")])

        assert await read(bounded, "kept", nbytes) in (None, record("kept", nbytes))
        assert (await bounded.stats()).num_evicted > 0
