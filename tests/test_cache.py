"""HiCache with real copies and real storage: what comes back is what went down, bit by bit."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hicache.actions import HitTokens, Refuse
from hicache.cache import HiCache
from hicache.config import CacheConfig
from hicache.errors import ConfigError
from hicache.events import RequestId
from hicache.keys import chain, pack
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from tests.cache_child import NUM_TOKENS, namespace, open_cache
from tests.cache_world import LAYOUT, Reader, content, page_bytes, tokens_of

ROOT = Path(__file__).parent.parent
BACKENDS = ("lmdb", "file")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[HiCache]:
    cache = open_cache(tmp_path / "store", "lmdb")
    yield cache
    cache.check()
    cache.close()


def _write(cache: HiCache, number: int, *, request: int, num_tokens: int = NUM_TOKENS) -> None:
    digest = cache.open_namespace(namespace())
    reader = Reader(cache, request, tokens_of(number, num_tokens, shared=6), digest)
    reader.acquire()
    assert reader.compute()
    reader.release()


def _hit(cache: HiCache, number: int, *, request: int) -> HitTokens:
    """Reuse a chain, with all bytes checked; return what hit."""
    digest = cache.open_namespace(namespace())
    reader = Reader(cache, request, tokens_of(number, NUM_TOKENS, shared=6), digest)
    lease = reader.acquire()
    assert reader.compute()
    hit = lease.hit
    reader.release()
    return hit


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(2, 2, 8, "float32", page_size=1),
        KVLayout(3, 1, 4, "bfloat16", page_size=16),
        KVLayout(1, 2, 8, "float16", page_size=7),
        KVLayout(2, 1, 16, "float8_e4m3fn", page_size=4),
        KVLayout(2, 1, 24, "bfloat16", page_size=8, kind="mla"),
    ],
    ids=lambda layout: f"{layout.dtype}-{layout.page_size}-{layout.kind}",
)
def test_pages_come_back_from_every_tier_bit_by_bit(
    tmp_path: Path, backend: str, layout: KVLayout
) -> None:
    config = CacheConfig.model_validate(
        {
            "page_size": layout.page_size,
            "device": {"size": "8p"},
            "host": {"size": "64p"},
            "storage": {
                "backend": backend,
                "path": tmp_path,
                "size": "32MB",
                "prefetch": "wait_complete",
            },
        }
    )
    space = Namespace(model_config="{}", weights=b"weights", layout=layout)
    token_ids = tokens_of(1, 6 * layout.page_size)
    cache = HiCache(layout, config)
    digest = cache.open_namespace(space)
    hits: list[HitTokens] = []

    def run(request: int, ids: list[int]) -> None:
        reader = Reader(cache, request, ids, digest)
        hits.append(reader.acquire().hit)
        assert reader.compute()
        reader.release()

    run(1, token_ids)
    run(2, token_ids)  # from L1
    cache.sync(30.0)
    run(3, tokens_of(2, 8 * layout.page_size))  # pushes it out of L1
    run(4, token_ids)  # from L2
    cache.close()
    cache = HiCache(layout, config)
    cache.open_namespace(space)
    run(5, token_ids)  # from L3
    cache.close()

    most = len(token_ids) - 1
    assert hits[0].total == 0
    assert hits[1].device == most
    assert hits[3].host > 0
    assert hits[3].total == most
    # The last page of a restarted store can be cut short: nobody probes for a page that is not
    # to be used whole.
    assert hits[4].device == hits[4].host == 0
    assert hits[4].storage >= most - most % layout.page_size


def test_a_page_size_that_is_not_the_layouts_is_refused_in_one_line() -> None:
    config = CacheConfig.model_validate({"page_size": LAYOUT.page_size + 1})

    with pytest.raises(ConfigError) as caught:
        HiCache(LAYOUT, config)

    assert str(caught.value) == "cache.page_size: 3 tokens, but the layout has pages of 2"


def test_a_hit_reaches_into_the_page_where_two_prompts_part(cache: HiCache) -> None:
    _write(cache, 1, request=1)
    digest = cache.open_namespace(namespace())
    token_ids = tokens_of(1, NUM_TOKENS, shared=6)[:16]
    token_ids[13] += 1  # the second token of a page of two

    reader = Reader(cache, 2, token_ids, digest)
    lease = reader.acquire()

    assert lease.hit == HitTokens(device=13)
    page = lease.slots[6]
    lease.wait(0)
    assert lease.is_intact
    keys = chain(digest, pack(tokens_of(1, NUM_TOKENS, shared=6)), 8)
    assert torch.equal(page_bytes(cache.device_pages, page), content(LAYOUT, keys[6]))
    reader.release()


def test_a_prompt_longer_than_l1_is_refused_with_its_reason(cache: HiCache) -> None:
    digest = cache.open_namespace(namespace())
    reader = Reader(cache, 1, range(100), digest)

    answer = reader.try_acquire()

    assert isinstance(answer, Refuse)
    assert answer.reason == "needs 50 pages, L1 has 16"
    reader.release()


def test_a_tenant_does_not_hit_what_another_has(cache: HiCache) -> None:
    _write(cache, 1, request=1)
    other = cache.open_namespace(namespace().salted("another tenant"))

    reader = Reader(cache, 2, tokens_of(1, NUM_TOKENS, shared=6), other)

    assert reader.acquire().hit.total == 0
    reader.release()


def test_flushing_empties_l1_and_l2_and_leaves_l3(cache: HiCache) -> None:
    _write(cache, 1, request=1)

    cache.flush(30.0)

    assert dict(cache.stats().num_used_pages) == {"device": 0, "host": 0}
    assert _hit(cache, 1, request=2) == HitTokens(storage=NUM_TOKENS - 1)


def test_forgetting_a_prefix_takes_it_out_of_every_tier(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, "lmdb")
    _write(cache, 1, request=1)
    digest = cache.open_namespace(namespace())
    assert cache.sync(30.0)

    cache.forget(digest)
    used = dict(cache.stats().num_used_pages)
    assert cache.close()

    assert used == {"device": 0, "host": 0}
    cache = open_cache(tmp_path, "lmdb")
    assert _hit(cache, 1, request=2).total == 0
    cache.close()


def test_what_happened_to_a_request_is_told_in_words(cache: HiCache) -> None:
    _write(cache, 1, request=1)
    _hit(cache, 1, request=2)

    told = cache.explain(RequestId(2))

    assert "12 pages hit in device" in told


def test_the_cache_says_what_it_uses(cache: HiCache) -> None:
    lines = cache.describe()

    assert [line.split()[:2] for line in lines] == [
        ["L1", "device"],
        ["L2", "host"],
        ["L3", "storage"],
    ]
    assert "32 tokens in 16 pages" in lines[0]


def _kill_while_it_writes(tmp_path: Path, backend: str, seed: int) -> None:
    """Kill a writing process at a random moment; all that it said was stored must be there."""
    path, patience = tmp_path / f"store-{backend}", random.Random(seed)
    acknowledged: list[int] = []
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.cache_child", str(path), backend, str(seed)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert child.stdout is not None
    num_lines = patience.randrange(1, 25)
    for line in child.stdout:
        if line.strip() != "open":
            acknowledged.append(int(line))
        num_lines -= 1
        if num_lines == 0:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
    child.stdout.close()

    cache = open_cache(path, backend)
    for number in acknowledged:
        hit = _hit(cache, number, request=number + 1)
        assert hit.total >= NUM_TOKENS - LAYOUT.page_size, f"chain {number} of seed {seed}: {hit}"
    stats = cache.stats().store
    assert stats is not None
    assert stats.num_corrupt_pages == 0
    cache.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, backend: str, seed: int) -> None:
    _kill_while_it_writes(tmp_path, backend, seed)


@pytest.mark.soak
def test_what_was_acknowledged_survives_kill_9_many_times(
    tmp_path: Path, backend: str, is_full: bool
) -> None:
    for seed in range(100 if is_full else 5):
        _kill_while_it_writes(tmp_path, backend, seed)


def test_tenants_who_come_by_the_hundred_give_their_pages_back(cache: HiCache) -> None:
    for number in range(200):
        digest = cache.open_namespace(namespace().salted(f"tenant {number}"))
        reader = Reader(cache, number + 1, tokens_of(number, 4), digest)
        reader.acquire()
        assert reader.compute()
        reader.release()

    cache.flush(30.0)

    assert dict(cache.stats().num_used_pages) == {"device": 0, "host": 0}
