"""L3 with codecs and with encryption: what was stored comes back, by whoever may read it."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.memory import MemoryBackend
from hicache.codec import KIND_NAMESPACE, parse
from hicache.errors import ConfigError, StorageUnavailable
from hicache.events import OpId
from hicache.keys import PageKey, PageRef
from hicache.storage import StorageBackend
from hicache.store import coded
from hicache.testing.faulty import Fault, Gate
from tests.disk_child import BACKENDS
from tests.disks import Disk
from tests.disks import FakeClock as DiskClock
from tests.stores import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PAGE_NBYTES,
    WAIT_S,
    World,
    namespace,
    page_refs,
    repetitive,
    slots,
)

KEYS = [random.Random(seed).randbytes(32).hex() for seed in range(3)]
MARK = b"\xa5" * PAGE_NBYTES
CODED: dict[str, dict[str, Any]] = {
    "zstd": {"codec": "zstd"},
    "planes": {"codec": "zstd-planes"},
    "sealed": {"key": KEYS[0]},
    "both": {"codec": "zstd-planes", "key": KEYS[0]},
}
ALL = {"none": {"codec": "none"}, **CODED}


class Shelf(MemoryBackend):
    """A backend that a test can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[PageKey] = []

    @property
    def held(self) -> dict[PageKey, bytes]:
        return self._records

    async def touch(self, keys: Sequence[PageKey]) -> None:
        self.touched += keys


def coded_world(inner: StorageBackend | None = None, **config: object) -> World:
    return World(inner=inner or Shelf(), config=dict(config), content=repetitive, item_nbytes=4)


def assert_fetched(world: World, pages: list[PageRef], first: int = 128) -> None:
    assert world.fetch_pages(pages, first) == [True] * len(pages)
    for slot, page in enumerate(pages, first):
        assert world.page(slot) == repetitive(page.key)


def flip(record: bytes, source: random.Random) -> bytes:
    at = source.randrange(len(record))
    return record[:at] + bytes([record[at] ^ 1 << source.randrange(8)]) + record[at + 1 :]


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "workers"])
@pytest.mark.parametrize("config", CODED.values(), ids=CODED)
def test_pages_come_back(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], inline: bool
) -> None:
    monkeypatch.setattr(coded, "SET_NBYTES", 10 * PAGE_NBYTES)
    monkeypatch.setattr(coded, "INLINE_NBYTES", PAGE_NBYTES * (1000 if inline else 1))
    pages = page_refs(33)
    with coded_world(**config) as world:
        assert world.store_pages(pages) == [True] * 33
        assert world.store_pages(pages) == [True] * 33

        assert_fetched(world, pages)

        stats = world.store.stats()
        assert stats.num_fetched_pages == stats.num_stored_pages == stats.num_present_pages == 33
        assert stats.read_nbytes == stats.written_nbytes
        world.reads_and_writes()


def test_a_store_that_codes_holds_fewer_bytes() -> None:
    pages, held = page_refs(20), {}
    for name, config in ALL.items():
        with coded_world(**config) as world:
            world.store_pages(pages)
            held[name] = world.store.stats().written_nbytes

    assert held["planes"] < held["none"] < held["sealed"]
    assert held["both"] < held["sealed"]


@pytest.mark.parametrize("reader", ALL.values(), ids=ALL)
@pytest.mark.parametrize("writer", [ALL["none"], ALL["zstd"], ALL["planes"]])
def test_a_store_with_records_of_all_codecs_reads_well(
    writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    inner, pages = Shelf(), page_refs(6)
    with coded_world(inner, **writer) as world:
        world.store_pages(pages[:3])

    with coded_world(inner, **reader) as world:
        # What is not sealed is not believed where pages are.
        is_found = "key" not in reader
        assert world.store_pages(pages[3:], first=3) == [True] * 3
        assert world.fetch_pages(pages) == [is_found] * 3 + [True] * 3
        assert world.page(128) == repetitive(pages[0].key) or not is_found
        assert world.store.stats().num_corrupt_pages == 0


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_an_unknown_codec_is_a_miss_and_is_written_anew(config: dict[str, Any]) -> None:
    [a, b, c] = pages = page_refs(3)
    with coded_world(**config) as world:
        world.store_pages([a, c])
        world.backend.next("put", Fault(tamper=lambda record, _: record[:7] + b"\x63" + record[8:]))
        world.store_pages([b], first=1)

        assert world.fetch_pages(pages) == [True, False, True]

        assert world.store.stats().num_corrupt_pages == 1
        assert world.store_pages([b], first=1) == [True]
        assert_fetched(world, pages)


@pytest.mark.parametrize("config", CODED.values(), ids=CODED)
def test_r13_a_damaged_coded_record_never_touches_the_page(config: dict[str, Any]) -> None:
    pages = page_refs(60)
    with coded_world(**config) as world:
        world.backend.always(Fault(tamper=flip), "put")
        world.store_pages(pages)
        world.backend.heal()
        world.memory[128 * PAGE_NBYTES :] = MARK * 128

        assert world.fetch_pages(pages) == [False] * 60

        assert world.memory[128 * PAGE_NBYTES :] == MARK * 128
        assert world.store.stats().num_corrupt_pages == 60
        assert world.store.stats().is_up


def test_a_stray_that_is_gone_when_it_is_read_again_is_a_miss() -> None:
    inner, pages = Shelf(), page_refs(2)
    with coded_world(inner, codec="zstd-planes") as world:
        world.store_pages(pages)

    with coded_world(inner) as world:
        gate = Gate()
        world.backend.next("get", Fault(after=gate))
        op = world.start_fetch(pages)
        gate.wait_until_reached()
        del inner.held[pages[0].key]
        gate.open()

        assert world.finished(op).outcomes == (False, True)
        assert world.store.stats().num_absent_pages == 1


def test_what_a_backend_refuses_is_not_counted_as_stored() -> None:
    pages = page_refs(3)
    with coded_world(codec="zstd-planes") as world:
        world.backend.next("put", Fault(answer=lambda _: [True, False, True]))

        assert world.store_pages(pages) == [True, False, True]

        assert world.store.stats().num_stored_pages == 2


# ---------------------------------------------------------------- scratch


def test_a_late_read_into_scratch_changes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = page_refs(4)
    with coded_world(codec="zstd-planes") as world:
        world.store_pages(pages)
        world.memory[128 * PAGE_NBYTES :] = MARK * 128
        gate = Gate()
        world.backend.next("get", Fault(before=gate))
        op = world.start_fetch(pages)
        gate.wait_until_reached()

        world.advance(5)
        assert world.finished(op).outcomes == (False,) * 4
        assert world.store.stats().num_overdue_pages == 4
        assert_fetched(world, pages, first=200)

        gate.open()
        world.returned(op)
        assert world.page(128) == MARK
        assert_fetched(world, pages)


def test_the_rest_of_a_call_that_was_given_up_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coded, "SET_NBYTES", 0)
    pages = page_refs(6)
    with coded_world(codec="zstd-planes") as world:
        gate = Gate()
        world.backend.next("put", Fault(before=gate))
        op = world.start_store(pages)
        gate.wait_until_reached()
        world.advance(5)
        world.finished(op)
        gate.open()
        world.returned(op)
        assert world.backend.num_calls["put"] == 1

        assert world.store_pages(pages) == [True] * 6
        gate = Gate()
        world.backend.next("get", Fault(before=gate))
        op = world.start_fetch(pages)
        gate.wait_until_reached()
        world.advance(5)
        world.finished(op)
        gate.open()
        world.returned(op)
        assert world.backend.num_calls["get"] == 1


def test_scratch_is_bounded_where_calls_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = page_refs(8)
    with coded_world(codec="zstd", concurrency=1, breaker_failures=100) as world:
        world.store_pages(pages)
        gates = [Gate() for _ in range(3)]
        ops: list[OpId] = []
        for gate, page in zip(gates, pages, strict=False):
            world.backend.next("get", Fault(before=gate))
            ops.append(world.start_fetch([page], first=128 + len(ops)))
            gate.wait_until_reached()
            world.advance(5)
            world.finished(ops[-1])

        assert world.fetch_pages(pages[3:], first=140) == [False] * 5
        assert world.store.stats().errors["fetch_StorageError"] == 1

        for gate, op in zip(gates, ops, strict=True):
            gate.open()
            world.returned(op)
        assert_fetched(world, pages)


def test_a_read_that_fails_midway_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "SET_NBYTES", 0)
    pages = page_refs(6)
    with coded_world(codec="zstd-planes") as world:
        world.store_pages(pages)
        world.backend.next("get", Fault())
        world.backend.next("get", Fault(error=StorageUnavailable("gone for a moment")))
        op = world.start_fetch(pages)
        world.wait_until(lambda: world.store.stats().num_retries == 1)
        world.advance(0.1)

        assert world.finished(op).outcomes == (True,) * 6


# ---------------------------------------------------------------- keys


def test_a_wrong_key_is_a_miss_and_deletes_nothing() -> None:
    inner, pages = Shelf(), page_refs(5)
    with coded_world(inner, key=KEYS[0]) as world:
        world.store_pages(pages)
        before = dict(inner.held)

    with coded_world(inner, key=KEYS[1]) as world:
        assert world.probe_keys([page.key for page in pages]) == [False] * 5
        assert world.fetch_pages(pages) == [False] * 5
        world.store.delete([page.key for page in pages])
        world.store.touch([page.key for page in pages])
        world.store.scan(NAMESPACE)
        assert world.store.flush(WAIT_S)
        stats = world.store.stats()
        assert (stats.num_absent_pages, stats.num_corrupt_pages, stats.errors) == (5, 0, {})
        world.wait_until(lambda: world.store.stats().num_foreign_pages == 5)
        assert world.store_pages(pages) == [True] * 5
        assert_fetched(world, pages)

    assert before.items() <= inner.held.items()
    with coded_world(inner, key=KEYS[0]) as world:
        assert_fetched(world, pages)


def test_after_a_rotation_old_pages_are_found_and_new_ones_sealed_anew() -> None:
    inner, pages = Shelf(), page_refs(6)
    with coded_world(inner, key=KEYS[0]) as world:
        world.store_pages(pages[:3])

    with coded_world(inner, key=f"{KEYS[1]}\n{KEYS[0]}") as world:
        assert world.probe_keys([page.key for page in pages]) == [True] * 3 + [False] * 3
        assert world.store_pages(pages) == [True] * 6
        assert world.store.stats().num_stored_pages == 3
        assert_fetched(world, pages)
        assert_fetched(world, pages[3:])
        assert world.probe_keys([page.key for page in pages[3:]]) == [True] * 3
        world.store.scan(NAMESPACE)
        [chain] = world.chains(1)
        assert chain.keys == tuple(page.key for page in pages)
        world.store.delete([pages[0].key, pages[5].key])
        assert world.store.flush(WAIT_S)
        found = world.probe_keys([page.key for page in pages])
        assert found == [False, True, True, True, True, False]

    with coded_world(inner, key=KEYS[1]) as world:
        assert world.fetch_pages(pages) == [False] * 3 + [True] * 2 + [False]


def test_s9_a_tenant_cannot_read_what_is_sealed_for_another() -> None:
    """Not even where somebody has put its record under the name that is looked for."""
    inner = Shelf()
    [mine] = page_refs(1)
    [theirs] = page_refs(1, namespace=OTHER_NAMESPACE)
    with coded_world(inner, key=KEYS[0]) as world:
        world.store_pages([mine])
        [record] = inner.held.values()
        op = world.new_op()
        world.store.store(op, OTHER_NAMESPACE, [theirs], slots(1))
        world.finished(op)
        for name in inner.held:
            inner.held[name] = record

        op = world.new_op()
        world.store.fetch(op, OTHER_NAMESPACE, [theirs], slots(128))
        assert world.finished(op).outcomes == (False,)
        assert world.store.stats().num_corrupt_pages == 1


def test_descriptors_are_found_under_their_own_keys() -> None:
    inner, mine = Shelf(), namespace()
    pages = page_refs(1)
    with coded_world(inner, key=KEYS[0]) as world:
        world.store.describe(mine)
        world.store_pages(pages)
        assert world.store.flush(WAIT_S)

    assert parse(inner.held[PageKey(mine.digest)]).kind == KIND_NAMESPACE
    assert pages[0].key not in inner.held


def test_uses_are_noted_under_names_and_of_descriptors() -> None:
    inner, [page] = Shelf(), page_refs(1)
    with coded_world(inner, key=f"{KEYS[0]}\n{KEYS[1]}") as world:
        world.store_pages([page])
        world.store.touch([page.key, PageKey(NAMESPACE)])
        assert world.store.close(WAIT_S)

    assert inner.held.keys() < set(inner.touched)
    assert PageKey(NAMESPACE) in inner.touched


def test_a_bad_key_file_is_told_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        coded_world(key_file=tmp_path / "key")


# ---------------------------------------------------------------- restart


@pytest.mark.parametrize("config", CODED.values(), ids=CODED)
@pytest.mark.parametrize("kind", BACKENDS)
def test_s2_the_pages_are_back_after_a_restart(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    mine = [page_refs(5), page_refs(3, first_token=900)]
    disk = Disk(kind, tmp_path, DiskClock())
    with coded_world(disk.backend(), **config) as world:
        for pages in mine:
            assert all(world.store_pages(pages))
        written = b"".join(path.read_bytes() for path in disk.files())
        if "key" in config:
            assert not any(page.tokens in written for pages in mine for page in pages)
            assert not any(bytes(page.key) in written for pages in mine for page in pages)

    with coded_world(disk.backend(), **config) as world:
        world.store.scan(NAMESPACE)
        found = {chain.keys: chain.tokens for chain in world.chains(2)}
        assert found == {
            tuple(page.key for page in pages): b"".join(page.tokens for page in pages)
            for pages in mine
        }
        for pages in mine:
            assert_fetched(world, pages)
