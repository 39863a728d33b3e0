"""Storage that lies, tried with pages: ``PageStore`` over both disk backends.

The names R3 to S10 are rows of a list of failures of other systems. The table at the head of
``test_disk_pitfalls`` says where each row is tried.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.errors import StorageError
from hicache.events import Finished
from hicache.keys import PageKey, PageRef
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.testing.faulty import Fault, Gate, truncate
from tests.disk_child import BACKENDS
from tests.disks import Disk, FakeClock
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

KINDS = sorted(BACKENDS)


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return Disk(request.param, tmp_path / "store", FakeClock())


@pytest.fixture
def world(disk: Disk) -> Iterator[World]:
    with World(inner=disk.backend(), config={"breaker_failures": 3}) as world:
        yield world


def store_in(world: World, where: Namespace, pages: list[PageRef], first: int = 0) -> None:
    op, source = world.new_op(), slots(*range(first, first + len(pages)))
    world.fill(pages, source)
    world.store.store(op, where.digest, pages, source)
    assert all(world.finished(op).outcomes)


def fetch_in(world: World, where: Namespace, pages: list[PageRef]) -> list[bool]:
    op = world.new_op()
    world.store.fetch(op, where.digest, pages, slots(*range(128, 128 + len(pages))))
    return list(world.finished(op).outcomes)


def store_with_retries(world: World, pages: list[PageRef]) -> list[bool]:
    """Store pages while time goes on, so that a call that failed is tried again."""
    op = world.start_store(pages)

    def is_over() -> bool:
        world.advance(0.1)
        return any(isinstance(one, Finished) and one.op == op for one in world.drain())

    world.wait_until(is_over)
    return list(world.finished(op).outcomes)


READERS = {
    "R3 dtype": namespace(layout=KVLayout(1, 1, 16, "float8_e4m3fn", PAGE_SIZE)),
    "R4 model name": namespace(model_config='{"_name_or_path":"org-a/b"}'),
    "R14 layout": namespace(layout=KVLayout(2, 1, 4, "bfloat16", PAGE_SIZE)),
    "S1 weights": namespace(weights=b"other"),
    "S9 salt": namespace().salted("tenant"),
    "S10 fields": namespace(model_config="{}w", weights=b"eights"),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_r3_r4_r14_s1_s9_s10_another_namespace_finds_nothing(
    world: World, reader: Namespace
) -> None:
    writer = namespace()
    pages = page_refs(2, namespace=writer.digest)
    store_in(world, writer, pages)

    assert fetch_in(world, reader, page_refs(2, namespace=reader.digest)) == [False] * 2
    assert world.probe_keys([one.key for one in page_refs(2, namespace=reader.digest)]) == [
        False,
        False,
    ]

    assert fetch_in(world, writer, pages) == [True] * 2
    assert world.page(128) == content(pages[0].key)


def test_r5_forgetting_one_namespace_leaves_the_other(world: World) -> None:
    mine, other = namespace(), namespace(weights=b"other")
    theirs = page_refs(3, namespace=other.digest)
    store_in(world, mine, page_refs(3, namespace=mine.digest))
    store_in(world, other, theirs)

    world.store.delete([page.key for page in page_refs(3, namespace=mine.digest)])
    assert world.store.flush(20)

    assert fetch_in(world, mine, page_refs(3, namespace=mine.digest)) == [False] * 3
    assert fetch_in(world, other, theirs) == [True] * 3


def test_r10_a_model_name_of_231_characters_works(world: World) -> None:
    long = namespace(model_config="x" * 231)
    pages = page_refs(2, namespace=long.digest)
    world.store.describe(long)

    store_in(world, long, pages)

    assert fetch_in(world, long, pages) == [True] * 2
    assert world.probe_keys([PageKey(long.digest)]) == [True]


def test_r12_later_pages_are_hits_where_earlier_ones_are_missing(world: World) -> None:
    pages = page_refs(4)
    world.store_pages(pages[2:])

    assert world.fetch_pages(pages) == [False, False, True, True]
    assert world.page(131) == content(pages[3].key)

    assert world.store_pages(pages[:2]) == [True, True]
    assert world.fetch_pages(pages) == [True] * 4


def test_r13_one_flipped_byte_of_a_page_is_a_miss_and_is_counted(disk: Disk, world: World) -> None:
    pages = page_refs(3)
    world.store_pages(pages)
    path, offset = disk.find(content(pages[1].key))
    with open(path, "r+b") as file:
        file.seek(offset + PAGE_NBYTES // 2)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))

    assert world.fetch_pages(pages) == [True, False, True]

    assert world.store.stats().num_corrupt_pages == 1
    assert world.probe_keys([page.key for page in pages]) == [True, False, True]
    assert world.store_pages(pages) == [True] * 3
    assert world.fetch_pages(pages) == [True] * 3


def test_s2_a_restart_finds_every_page_and_writes_none_again(disk: Disk) -> None:
    pages = page_refs(40)
    with World(inner=disk.backend()) as world:
        world.store_pages(pages)

    with World(inner=disk.backend()) as world:
        world.store.scan(NAMESPACE)
        [chain] = world.chains(1)

        assert list(chain.keys) == [page.key for page in pages]
        assert world.store_pages(pages) == [True] * 40
        assert world.store.stats().num_present_pages == 40
        assert world.fetch_pages(pages) == [True] * 40


def test_s5_raising_and_short_reads_are_misses_until_it_recovers(world: World) -> None:
    pages, others = page_refs(2), page_refs(2, first_token=5000)
    world.store_pages(pages)
    world.backend.next("put", Fault(tamper=truncate))
    world.store_pages(others)
    assert world.fetch_pages(others).count(False) >= 1

    world.backend.always(Fault(error=StorageError("gone")), "get", "contains", "put")
    while world.store.stats().is_up:
        assert world.fetch_pages(pages) == [False] * 2
    world.backend.heal()
    world.advance(6)
    world.wait_until(lambda: world.store.stats().is_up)

    assert world.fetch_pages(pages) == [True] * 2
    assert world.store.stats().num_breaks == 1


def test_s5_a_hanging_read_costs_its_deadline_and_no_other_page(world: World) -> None:
    pages, others = page_refs(2), page_refs(2, first_token=5000)
    world.store_pages(pages)
    world.store_pages(others, first=2)
    gate = Gate()
    world.backend.next("get", Fault(before=gate, ignores_cancel=True))
    op = world.start_fetch(pages, first=140)
    gate.wait_until_reached()

    world.advance(5)

    assert world.finished(op).outcomes == (False, False)
    assert world.fetch_pages(others, first=130) == [True] * 2
    gate.open()
    world.returned(op)
    assert world.page(130) == content(others[0].key)


CHILD = """
from hicache.keys import NamespaceDigest, chain
print(*[key.hex() for key in chain(NamespaceDigest(bytes.fromhex("{}")), bytes.fromhex("{}"), {})])
"""


def test_s7_another_process_with_another_hash_seed_has_the_same_keys(world: World) -> None:
    pages = page_refs(3)
    tokens = b"".join(page.tokens for page in pages)
    code = CHILD.format(NAMESPACE.hex(), tokens.hex(), len(pages[0].tokens))
    environ = {"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)}
    said = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    world.store_pages(pages)

    assert world.probe_keys([PageKey(bytes.fromhex(word)) for word in said.split()]) == [True] * 3


def test_s8_a_record_of_other_tokens_under_the_same_key_is_a_miss(world: World) -> None:
    [page] = page_refs(1)
    world.store_pages([PageRef(page.key, page.parent, 0, bytes(len(page.tokens)))])

    assert world.fetch_pages([page]) == [False]

    assert world.store.stats().num_corrupt_pages == 1


def test_r11_deleting_every_file_of_an_open_store_costs_misses_only(
    disk: Disk, world: World
) -> None:
    pages = page_refs(3)
    world.store_pages(pages)
    for path in disk.files():
        path.unlink()

    assert world.fetch_pages(pages) == [False] * 3

    assert store_with_retries(world, pages) == [True] * 3
    assert world.fetch_pages(pages) == [True] * 3
