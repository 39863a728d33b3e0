"""The store over a backend that tells the truth."""

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import pytest

from hicache.backends.memory import MemoryBackend
from hicache.codec import decode_namespace
from hicache.config import StorageConfig
from hicache.errors import ConfigError, StorageError, StorageUnavailable
from hicache.events import Finished, OpId, Probed
from hicache.keys import PageKey
from hicache.storage import StorageBackend
from hicache.store import PageStore, calls
from hicache.testing.faulty import Fault, Gate, flip
from tests.stores import (
    NAMESPACE,
    PAGE_NBYTES,
    PAGE_SIZE,
    World,
    content,
    namespace,
    page_refs,
    slots,
)

# ---------------------------------------------------------------- what works


def test_a_stored_page_is_fetched_bit_for_bit() -> None:
    pages = page_refs(20)
    with World() as world:
        assert world.store_pages(pages) == [True] * 20

        assert world.fetch_pages(pages, first=100) == [True] * 20

        for number, page in enumerate(pages):
            assert world.page(100 + number) == content(page.key)
        stats = world.store.stats()
        assert (stats.num_stored_pages, stats.num_fetched_pages) == (20, 20)
        assert stats.read_nbytes == stats.written_nbytes > 20 * PAGE_NBYTES
        assert stats.call_seconds["fetch"].num > 0
        world.store.check()


def test_checksums_of_much_are_computed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "INLINE_NBYTES", PAGE_NBYTES)
    pages = page_refs(20)
    with World() as world:
        world.backend.next("put", Fault(tamper=flip))
        assert world.store_pages(pages[:1]) == [True]
        assert world.store_pages(pages[1:], first=1) == [True] * 19

        assert world.fetch_pages(pages) == [False] + [True] * 19


def test_pages_outlive_the_store() -> None:
    pages = page_refs(3)
    with World() as world:
        world.store_pages(pages)
        first = world.store
        assert first.close(20)
        world.store = world.new_store()
        world.store.start()

        assert world.fetch_pages(pages) == [True] * 3


def test_a_probe_tells_what_is_there() -> None:
    pages = page_refs(4)
    with World() as world:
        world.store_pages(pages[:2])

        assert world.probe_keys([page.key for page in pages]) == [True, True, False, False]


def test_an_operation_of_no_pages_ends() -> None:
    with World() as world:
        op = world.new_op()

        world.store.fetch(op, NAMESPACE, [], slots())

        assert world.store.drain() == [Finished(op, ())]


def test_a_page_that_is_there_is_not_written_again() -> None:
    pages = page_refs(3)
    with World() as world:
        world.store_pages(pages[:2])
        puts = world.backend.num_calls["put"]

        assert world.store_pages(pages[:2]) == [True, True]
        assert world.backend.num_calls["put"] == puts
        assert world.store_pages(pages) == [True] * 3

        assert world.store.stats().num_present_pages == 4
        assert world.store.stats().num_stored_pages == 3


def test_deleted_pages_are_gone() -> None:
    pages = page_refs(2)
    with World() as world:
        world.store_pages(pages)

        world.store.delete([page.key for page in pages])
        assert world.store.flush(20)

        assert world.fetch_pages(pages) == [False, False]
        assert world.store.stats().num_deleted_pages == 2
        assert world.store.stats().num_absent_pages == 2


def test_flush_waits_for_stores() -> None:
    gate, pages = Gate(), page_refs(1)
    with World() as world:
        world.backend.next("put", Fault(before=gate))
        op = world.start_store(pages)
        assert not world.store.flush(0)

        gate.open()

        assert world.store.flush(20)
        assert world.drain() == [Finished(op, (True,))]


def test_uses_are_written_down_once_an_interval_and_once_each() -> None:
    pages = page_refs(3)
    with World(config={"touch_interval_s": 60}) as world:
        keys = [page.key for page in pages]
        for _ in range(5):
            world.store.touch(keys)
        world.store.touch(keys[:1])
        assert world.backend.num_calls["touch"] == 0

        world.advance(60)
        world.wait_until(lambda: world.backend.num_calls["touch"] == 1)
        world.advance(60)
        world.probe_keys([])

        assert world.backend.num_calls["touch"] == 1


def test_the_description_of_a_namespace_is_used_with_its_pages() -> None:
    """Nothing reads it, so that it would be the first to be evicted."""
    space = namespace()
    room = 4 * (PAGE_NBYTES + 256)
    with World(inner=MemoryBackend(room)) as world:
        world.store.describe(space)
        for first in range(0, 40, 4):
            [page] = page_refs(1, first_token=first, namespace=space.digest)
            assert world.store_pages([page]) == [True]
            world.store.touch([page.key])
            world.store.pump()
            world.advance(60)
            world.wait_until(lambda: world.backend.num_calls["touch"] > 0)
            world.backend.num_calls.clear()

        assert world.probe_keys([PageKey(space.digest)]) == [True]


def test_uses_beyond_what_is_kept_are_forgotten() -> None:
    with World() as world:
        many = [PageKey(number.to_bytes(32)) for number in range((1 << 17) + 1)]

        world.store.touch(many)
        world.advance(60)
        world.probe_keys(many[:1])

        assert world.backend.num_calls["touch"] == 0


def test_uses_are_written_down_at_the_end() -> None:
    with World() as world:
        world.store.touch([PageKey(bytes(32))])

    assert world.backend.num_calls["touch"] == 1


def test_a_namespace_is_described_under_its_digest_once() -> None:
    described = namespace()
    with World() as world:
        for _ in range(2):
            world.store.describe(described)
        assert world.store.flush(20)

    buffer = memoryview(bytearray(4096))
    [length] = _run(world.inner, [PageKey(described.digest)], buffer)
    record = bytes(buffer[:length])
    assert decode_namespace(described.digest, record) == described.descriptor
    assert world.backend.num_calls["put"] == 1


def _run(backend: StorageBackend, keys: list[PageKey], buffer: memoryview) -> list[int | None]:
    """Read from a backend that never waits."""
    coroutine = backend.get(keys, [[buffer]])
    try:
        coroutine.send(None)
    except StopIteration as end:
        lengths: list[int | None] = end.value
        return lengths
    raise AssertionError("it waits")


def test_stats_show_what_the_backend_holds() -> None:
    with World(config={"touch_interval_s": 60}) as world:
        world.store_pages(page_refs(3))

        world.advance(60)
        world.wait_until(lambda: getattr(world.store.stats().backend, "num_records", 0) == 3)

        assert world.store.stats().is_up


def test_a_backend_that_hangs_over_its_stats_is_asked_once() -> None:
    gate = Gate()
    with World(config={"touch_interval_s": 60}) as world:
        world.wait_until(lambda: world.store.stats().backend is not None)
        world.backend.next("stats", Fault(before=gate))
        for _ in range(5):
            world.advance(60)
            world.wait_until(lambda: world.backend.num_calls["stats"] == 2)
            world.probe_keys([])

        assert world.backend.num_calls["stats"] == 2
        gate.open()


# ---------------------------------------------------------------- opening


def test_a_backend_that_does_not_open_says_why_in_one_line() -> None:
    world = World()
    world.backend.next("open", Fault(error=StorageUnavailable("/store: no such device")))

    with pytest.raises(StorageUnavailable, match="/store: no such device"):
        world.store.start()

    assert world.store.close(20)


def test_whatever_a_backend_raises_when_it_opens_is_a_storage_error() -> None:
    world = World()
    world.backend.next("open", Fault(error=KeyError("x")))

    with pytest.raises(StorageError, match="FaultyBackend: KeyError: 'x'"):
        world.store.start()


def test_a_backend_that_hangs_when_it_opens_does_not_hang_the_start() -> None:
    world, gate = World(), Gate()
    world.backend.next("open", Fault(before=gate))

    with pytest.raises(StorageUnavailable, match=r"did not open in 0\.01 s"):
        world.store.start(timeout_s=0.01)

    gate.open()
    assert world.store.close(20)


def test_pages_must_fit_the_alignment_of_the_backend() -> None:
    world = World()
    world.backend.alignment = 512  # type: ignore[misc]

    with pytest.raises(ConfigError, match="256 bytes are no multiple of the 512"):
        world.new_store()


class AlignedBackend(MemoryBackend):
    """Refuses buffers whose address is no multiple of 64."""

    alignment: ClassVar[int] = 64

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        for [header, page] in into:
            assert len(header) % 64 == len(page) % 64 == 0
            assert ctypes.addressof(ctypes.c_char.from_buffer(header)) % 64 == 0
        return await super().get(keys, into)


def test_header_buffers_are_as_aligned_as_the_backend_wants() -> None:
    pages = page_refs(3)
    with World(inner=AlignedBackend()) as world:
        world.store_pages(pages)

        assert world.fetch_pages(pages) == [True] * 3


# ---------------------------------------------------------------- the end


def test_a_store_that_was_never_started_can_be_closed() -> None:
    world = World()

    assert world.store.close(0)


def test_after_close_everything_is_a_miss_at_once() -> None:
    pages = page_refs(1)
    world = World()
    with world:
        world.store_pages(pages)

    world.store.fetch(OpId(90), NAMESPACE, pages, slots(128))
    world.store.probe(OpId(91), NAMESPACE, [pages[0].key])
    world.store.store(OpId(92), NAMESPACE, pages, slots(0))
    world.store.scan(NAMESPACE)
    world.store.delete([pages[0].key])

    assert world.store.drain() == [
        Finished(OpId(90), (False,)),
        Probed(OpId(91), (False,)),
        Finished(OpId(92), (False,)),
    ]
    assert world.store.stats().dropped == {
        "fetch_closed": 1,
        "probe_closed": 1,
        "store_closed": 1,
        "delete_closed": 1,
    }


def test_the_default_clock_is_the_real_one() -> None:
    world = World()
    store = PageStore(
        world.backend,
        memoryview(world.memory),
        PAGE_NBYTES,
        StorageConfig(),
        page_size=PAGE_SIZE,
    )
    store.start()
    store.probe(OpId(1), NAMESPACE, [PageKey(bytes(32))])

    assert store.wake.wait(20)
    assert store.drain() == [Probed(OpId(1), (False,))]
    assert store.close(20)
