"""The cache on copies in streams: what a request sees of a load, and of one that fails."""

from array import array
from collections.abc import Iterator

import pytest
import torch

from hicache.cache import HiCache, Lease
from hicache.cache.opening import open_parts
from hicache.config import CacheConfig
from hicache.events import RequestId
from hicache.keys import NamespaceDigest, pack
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.transfer import CudaTransfer
from tests.fake_streams import FakeGpu

LAYOUT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
PREFIX = 16
PROMPT = list(range(1, PREFIX + 5))


class World:
    """A cache whose L1 is on a fake GPU, and what an engine does with it."""

    def __init__(self, num_layer_groups: int = 2) -> None:
        settings = {"page_size": 4, "device": {"size": "8p"}, "host": {"size": "32p"}}
        config = CacheConfig.model_validate({**settings, "storage": {"backend": "none"}})
        self.gpu = FakeGpu()
        parts = open_parts(LAYOUT, config, "cpu", lambda: 0.0)
        parts.transfer.close()
        parts.transfer = CudaTransfer(parts.device, parts.host, self.gpu, num_layer_groups)
        self.cache = HiCache(LAYOUT, config, parts=parts)
        namespace = Namespace(model_config="{}", weights=b"toy", layout=LAYOUT)
        self.namespace: NamespaceDigest = self.cache.open_namespace(namespace)

    def lease(self, number: int, tokens: list[int]) -> Lease:
        request = RequestId(number)
        packed = pack(array("i", tokens))
        self.cache.prefetch(request, self.namespace, packed, max_hit_tokens=len(tokens) - 1)
        lease = self.cache.acquire(request, len(tokens))
        assert isinstance(lease, Lease)
        return lease

    def compute(self, lease: Lease, tokens: list[int]) -> None:
        """Compute what the lease lacks: KV is the token itself, in the stream of computation."""
        pages = self.cache.device_pages

        def forward() -> None:
            for position in range(lease.hit.total, len(tokens)):
                slot = lease.slots[position // 4]
                pages[slot, :, :, position % 4] = float(tokens[position])

        self.gpu.launch("forward", forward)
        self.gpu.run()  # as the engine waits for its logits
        whole = len(tokens) // 4 * 4
        first = lease.num_committed_pages * 4
        self.cache.commit(lease, pack(array("i", tokens[first:whole])))

    def turn(self, number: int, tokens: list[int]) -> None:
        self.compute(self.lease(number, tokens), tokens)
        self.settle()
        self.cache.release(RequestId(number))

    def settle(self) -> None:
        for _ in range(3):
            self.gpu.run()
            self.cache.poll()

    def in_host_only(self) -> None:
        """Compute the prompt, and let two others push it out of L1."""
        self.turn(1, PROMPT)
        self.turn(2, list(range(100, 116)))
        self.turn(3, list(range(200, 216)))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.cache.check()


def test_a_load_that_fails_is_revoked_and_computed_again(world: World) -> None:
    world.in_host_only()
    world.gpu.copies_until_failure = 0

    lease = world.lease(4, PROMPT)
    assert lease.hit.host > 0
    for layer in range(LAYOUT.num_layers):
        lease.wait(layer)
    world.gpu.run()
    world.gpu.copies_until_failure = None

    assert not lease.is_intact
    polled = world.cache.poll()
    assert [each.request for each in polled.revoked] == [4]
    assert lease.num_valid_tokens < lease.hit.total
    world.cache.release(RequestId(4))
    world.turn(5, PROMPT)  # whose load succeeds
    again = world.lease(6, PROMPT)
    assert again.hit.device >= PREFIX


def test_a_gpu_that_fails_under_a_load_revokes_it(world: World) -> None:
    world.in_host_only()

    lease = world.lease(4, PROMPT)
    world.gpu.is_broken = True

    assert not lease.is_intact
    assert [each.request for each in world.cache.poll().revoked] == [4]


def test_a_step_waits_once_a_layer_group(world: World) -> None:
    world.in_host_only()
    lease = world.lease(4, PROMPT)
    before = len(world.gpu.waits)

    covered = 0
    for layer in range(LAYOUT.num_layers):
        if layer >= covered:
            covered = lease.wait(layer)

    waits = world.gpu.waits[before:]
    assert waits.count(("compute", "load")) == 2
    world.gpu.run()
    assert lease.is_intact
    assert lease.wait(0) >= LAYOUT.num_layers


def test_a_forward_waits_for_the_layers_that_it_reads_and_no_more(world: World) -> None:
    world.in_host_only()
    seen: list[torch.Tensor] = []
    pages = world.cache.device_pages

    lease = world.lease(4, PROMPT)
    slots = list(lease.slots[: PREFIX // 4])
    world.gpu.log.clear()
    lease.wait(0)
    world.gpu.launch("forward", lambda: seen.append(pages[slots, 0, 0, :, 0, 0].flatten()))
    world.gpu.run("compute", "page")

    assert seen[0].tolist() == [float(token) for token in PROMPT[:PREFIX]]
    num_loaded = world.gpu.log.index("forward")
    assert world.gpu.log[:num_loaded].count("load") < world.gpu.log.count("load")
    assert world.gpu.num_synchronized == 0
    assert lease.is_intact
