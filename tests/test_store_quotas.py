"""A store with limits: shares of tenants and bytes a day, over a backend, and after a restart."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from hicache.backends.memory import MemoryBackend
from hicache.codec import header_nbytes
from hicache.keys import PageKey, PageRef
from hicache.namespace import Namespace
from hicache.store.wear import DAY_S, SLOT_S
from hicache.testing.faulty import Fault
from tests.stores import PAGE_NBYTES, PAGE_SIZE, World, namespace, page_refs, slots

RECORD_NBYTES = header_nbytes(PAGE_SIZE) + PAGE_NBYTES
ACME, GUEST = namespace().salted("acme"), namespace().salted("guest")


KEYS = [bytes([number] * 32).hex() for number in (1, 2)]


def size(num_records: float) -> str:
    return f"{int(num_records * RECORD_NBYTES)}B"


def limited(num_records: float, **config: Any) -> World:
    """Return a world in which acme may have so many records."""
    return World(config={"tenants": {"acme": {"max_size": size(num_records)}}, **config})


def pages_of(tenant: Namespace, num: int, first_token: int = 0) -> list[PageRef]:
    return page_refs(num, first_token=first_token, namespace=tenant.digest)


def store(world: World, tenant: Namespace, pages: Sequence[PageRef]) -> list[bool]:
    op, source = world.new_op(), slots(*range(len(pages)))
    world.fill(pages, source)
    world.store.store(op, tenant.digest, pages, source)
    return list(world.finished(op).outcomes)


def there(world: World, pages: Sequence[PageRef]) -> list[bool]:
    return world.probe_keys([page.key for page in pages])


# ---------------------------------------------------------------- shares


def test_one_tenant_floods_and_the_others_pages_stay() -> None:
    with limited(4) as world:
        world.store.describe(ACME)
        world.store.describe(GUEST)
        guests = pages_of(GUEST, 6)
        assert store(world, GUEST, guests) == [True] * 6

        for first_token in range(1000, 5000, 100):
            assert store(world, ACME, pages_of(ACME, 3, first_token)) == [True] * 3
            world.advance(1.0)

        assert there(world, guests) == [True] * 6
        stats = world.store.stats()
        assert stats.tenant_nbytes == {"acme": 4 * RECORD_NBYTES}
        assert stats.num_share_evicted_pages == 40 * 3 - 4
        world.store.check()


def test_a_tenant_keeps_what_it_uses_and_loses_tails_first() -> None:
    with limited(4) as world:
        world.store.describe(ACME)
        used, idle = pages_of(ACME, 2), pages_of(ACME, 2, 500)
        store(world, ACME, used)
        world.advance(1.0)
        store(world, ACME, idle)
        world.advance(1.0)
        op = world.new_op()
        world.store.fetch(op, ACME.digest, used, slots(20, 21))
        assert list(world.finished(op).outcomes) == [True, True]
        world.advance(1.0)

        store(world, ACME, pages_of(ACME, 1, 900))

        assert there(world, [*used, *idle]) == [True, True, True, False]


def test_a_batch_larger_than_the_share_is_stored_as_far_as_it_fits() -> None:
    with limited(2) as world:
        world.store.describe(ACME)

        assert store(world, ACME, pages_of(ACME, 5)) == [True, True, False, False, False]

        assert world.store.stats().dropped == {"store_share": 3}


def test_every_salt_may_have_the_same_share() -> None:
    tenants: dict[str, Any] = {"acme": {}}  # none: no share of its own, so that of every salt
    with World(config={"tenant_max_size": size(2), "tenants": tenants}) as world:
        for tenant in (ACME, GUEST, namespace()):
            world.store.describe(tenant)
            for first_token in (0, 100, 200):
                store(world, tenant, pages_of(tenant, 2, first_token))

        assert world.store.stats().tenant_nbytes == {"other": 4 * RECORD_NBYTES}
        assert sum(there(world, pages_of(ACME, 2, 200))) == 2
        assert sum(there(world, pages_of(namespace(), 2))) == 2


@pytest.mark.parametrize("scanned", [namespace(), None])
@pytest.mark.parametrize("seal", [None, *KEYS[:1]], ids=["plain", "sealed"])
def test_a_share_is_kept_across_a_restart(seal: str | None, scanned: Namespace | None) -> None:
    inner = MemoryBackend()
    with World(inner=inner, config={"key": seal}) as world:
        store(world, ACME, pages_of(ACME, 4))
        asyncio.run(inner.put([(PageKey(b"f" * 32), [b"no header of ours" * 20])]))
        held = world.store.stats().written_nbytes
    config: dict[str, Any] = {"tenants": {"acme": {"max_size": f"{held}B"}}, "key": seal}
    with World(config=config, inner=inner) as world:
        if scanned is not None:
            world.store.describe(scanned)
            world.store.scan(scanned.digest)
        world.store.describe(ACME)
        world.wait_until(lambda: world.store.stats().tenant_nbytes["acme"] == held)

        store(world, ACME, pages_of(ACME, 1, 500))

        assert there(world, pages_of(ACME, 4)) == [True, True, True, False]
        world.store.describe(ACME)
        world.store.check()


@pytest.mark.parametrize("seal", [KEYS[1], None], ids=["another key", "no key"])
def test_what_is_sealed_with_a_key_that_is_not_here_is_in_no_share(seal: str | None) -> None:
    inner = MemoryBackend()
    with World(inner=inner, config={"key": KEYS[0]}) as world:
        store(world, ACME, pages_of(ACME, 3))
    with World(config={**limited(4).config, "key": seal}, inner=inner) as world:
        world.store.describe(ACME)
        world.wait_until(lambda: world.store.stats().num_foreign_pages == 3)

        assert world.store.stats().tenant_nbytes == {"acme": 0}


def test_a_victim_that_cannot_be_deleted_still_counts() -> None:
    with limited(1) as world:
        world.store.describe(ACME)
        store(world, ACME, pages_of(ACME, 1))
        world.backend.next("delete", Fault(error=RuntimeError("no")))

        assert store(world, ACME, pages_of(ACME, 1, 100)) == [False]

        assert world.store.stats().tenant_nbytes == {"acme": RECORD_NBYTES}
        assert store(world, ACME, pages_of(ACME, 1, 200)) == [True]
        assert there(world, pages_of(ACME, 1)) == [False]


def test_what_is_deleted_or_lost_leaves_room() -> None:
    with limited(2) as world:
        world.store.describe(ACME)
        one, other = pages_of(ACME, 1), pages_of(ACME, 1, 100)
        store(world, ACME, [*one, *other])

        world.store.delete([one[0].key])
        assert world.store.flush(10.0)

        assert world.store.stats().tenant_nbytes == {"acme": RECORD_NBYTES}


class FewAtOnce(MemoryBackend):
    max_batch = 4


def test_a_share_that_was_made_smaller_is_kept_from_the_next_store_on() -> None:
    inner = FewAtOnce()
    with World(inner=inner) as world:
        store(world, ACME, pages_of(ACME, 10))
    with World(config=limited(2).config, inner=inner) as world:
        world.store.describe(ACME)
        world.wait_until(lambda: world.store.stats().tenant_nbytes["acme"] == 10 * RECORD_NBYTES)

        store(world, ACME, pages_of(ACME, 1, 500))

        assert world.backend.num_calls["delete"] == 3
        assert sum(there(world, pages_of(ACME, 10))) == 1


# ---------------------------------------------------------------- bytes a day


def test_beyond_the_bytes_of_a_day_stores_are_dropped_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with World(config={"max_written_per_day": size(3.5)}) as world:
        pages = page_refs(5)

        assert world.store_pages(pages) == [True] * 3 + [False] * 2
        assert world.store_pages(page_refs(2, first_token=900)) == [False] * 2

        assert world.store.stats().dropped == {"store_written_per_day": 4}
        assert world.store.stats().day_written_nbytes == 3 * RECORD_NBYTES
        assert world.fetch_pages(pages[:3]) == [True] * 3
        assert world.store_pages(pages[:3]) == [True] * 3
        assert [r.message for r in caplog.records if "max_written_per_day" in r.message] != []
        assert len(caplog.records) == 1
        world.advance(DAY_S + SLOT_S)
        assert world.store_pages(page_refs(3, first_token=900)) == [True] * 3


def test_what_was_written_in_the_day_before_a_restart_counts() -> None:
    inner = MemoryBackend()
    with World(inner=inner) as world:
        world.store_pages(page_refs(3))
    with World(config={"max_written_per_day": size(4)}, inner=inner) as world:
        world.store.scan(namespace().digest)
        world.wait_until(lambda: world.store.stats().day_written_nbytes == 3 * RECORD_NBYTES)
        world.store.scan(namespace().digest)  # counts nothing twice

        outcomes = world.store_pages(page_refs(2, first_token=900))

        assert outcomes == [True, False]


def test_what_a_backend_did_not_accept_was_not_written() -> None:
    with World(
        inner=MemoryBackend(budget_nbytes=RECORD_NBYTES - 1),
        config={"max_written_per_day": size(2)},
    ) as world:
        assert world.store_pages(page_refs(2)) == [False, False]

        assert world.store.stats().day_written_nbytes == 0
        assert world.store.stats().dropped == {"store_refused": 2}
