"""The memory of L1 and L2."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hicache.errors import ConfigError
from hicache.layout import ITEM_NBYTES, KVLayout
from hicache.pools import (
    DevicePool,
    HostPool,
    LoggedProgress,
    node_of,
    num_device_pages,
    num_host_pages,
)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
BIG = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=64)


class FakeRegistrar:
    """Remembers what is pinned; refuses beyond ``limit`` registrations."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.pinned: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> bool:
        if len(self.pinned) == self.limit:
            return False
        end = address + nbytes
        assert all(end <= start or start + size <= address for start, size in self.pinned.items())
        self.pinned[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.pinned[address]


def machine_with(tmp_path: Path, nbytes: int) -> Path:
    """Return the root of a machine with that much memory."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {nbytes // 1024} kB\nMemAvailable: {nbytes // 1024} kB\n"
    )
    return tmp_path


@pytest.mark.parametrize("dtype", ITEM_NBYTES)
def test_pages_have_the_form_of_the_layout(dtype: str) -> None:
    layout = KVLayout(2, 2, 8, dtype, 4)

    for pool in (DevicePool(layout, 5), HostPool(layout, 5)):
        assert pool.pages.shape == (5, 2, 2, 4, 2, 8)
        assert pool.pages.dtype == getattr(torch, dtype)
        assert pool.pages.is_contiguous()
        assert not pool.pages.view(torch.uint8).any()


def test_host_memory_is_the_bytes_of_the_pages() -> None:
    pool = HostPool(LAYOUT, 3)

    pool.pages[1] = 1.0
    pool.memory[2 * pool.page_nbytes : 3 * pool.page_nbytes] = b"\x01" * pool.page_nbytes

    page = bytes(pool.memory[pool.page_nbytes : 2 * pool.page_nbytes])
    assert page == torch.ones(LAYOUT.page_shape).numpy().tobytes()
    assert pool.pages[2].view(torch.uint8).eq(1).all()
    assert len(pool.memory) == 3 * LAYOUT.page_nbytes


def test_memory_outlives_the_pool_that_it_came_from() -> None:
    memory = HostPool(LAYOUT, 3).memory

    memory[0] = 7

    assert memory[0] == 7


def test_there_can_be_no_l2_at_all() -> None:
    pool = HostPool(LAYOUT, 0)

    assert pool.pages.shape == (0, *LAYOUT.page_shape)
    assert len(pool.memory) == 0
    assert not pool.is_pinned
    pool.close()


def test_progress_is_told_to_the_end() -> None:
    told: list[tuple[int, int]] = []

    HostPool(LAYOUT, 8, progress=lambda done, total: told.append((done, total)))

    assert told[-1] == (8 * LAYOUT.page_nbytes, 8 * LAYOUT.page_nbytes)


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"L2: .* GB of memory cannot be had"):
        HostPool(BIG, 2**40)


# ---------------------------------------------------------------- pinning


def test_host_memory_is_pinned_in_chunks_of_whole_pages() -> None:
    registrar = FakeRegistrar()
    layout = KVLayout(3, 1, 7, "bfloat16", 16)  # 1,344 bytes a page: no page of the system

    pool = HostPool(layout, 200, registrar, chunk_nbytes=100_000)

    assert pool.is_pinned
    assert len(registrar.pinned) == 4
    assert sum(registrar.pinned.values()) == len(pool.memory)
    assert {address % 4096 for address in registrar.pinned} == {0}
    assert set(list(registrar.pinned.values())[:-1]) == {pool.chunk_pages * pool.page_nbytes}


def test_closing_unpins_what_was_pinned_once() -> None:
    registrar = FakeRegistrar()
    pool = HostPool(LAYOUT, 8, registrar)

    pool.close()
    pool.close()

    assert registrar.pinned == {}
    assert not pool.is_pinned


def test_memory_that_cannot_be_pinned_is_used_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "hicache.pools"):
        pool = HostPool(LAYOUT, 8, FakeRegistrar(limit=0))

    assert "refused to pin" in caplog.text
    assert not pool.is_pinned
    pool.pages[3] = 2.0
    pool.close()


def test_what_could_be_pinned_before_a_refusal_stays_so(caplog: pytest.LogCaptureFixture) -> None:
    registrar = FakeRegistrar(limit=2)
    layout = KVLayout(2, 1, 256, "float32", 2)  # 8,192 bytes a page

    with caplog.at_level(logging.WARNING, "hicache.pools"):
        pool = HostPool(layout, 10, registrar, chunk_nbytes=2 * 8192)

    assert len(registrar.pinned) == 2
    assert not pool.is_pinned
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert pool.chunk_pages == 2, "copies must not cross from what is pinned into what is not"
    pool.close()
    assert registrar.pinned == {}


def test_memory_is_pinned_chunk_by_chunk_as_it_is_touched() -> None:
    told: list[tuple[int, int]] = []
    registrar = FakeRegistrar()
    layout = KVLayout(2, 1, 256, "float32", 2)

    def progress(done: int, total: int) -> None:
        told.append((done, len(registrar.pinned)))

    HostPool(layout, 5, registrar, progress, chunk_nbytes=2 * 8192)

    assert told == [(2 * 8192, 1), (4 * 8192, 2), (5 * 8192, 3)]


def test_l2_is_right_wherever_it_should_be() -> None:
    pool = HostPool(LAYOUT, 8, numa_node=0)

    pool.pages[3] = 2.0

    assert pool.pages.sum() == 2.0 * pool.pages[3].numel()


def test_progress_that_takes_long_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    progress = LoggedProgress("L2", every_s=5.0, clock=lambda: now[0])

    with caplog.at_level(logging.INFO, "hicache.pools"):
        for second in range(12):
            now[0] = float(second)
            progress(second * 10**9, 11 * 10**9)

    said = [record.getMessage() for record in caplog.records]
    assert said == ["L2: 5 GB of 11 GB are ready", "L2: 10 GB of 11 GB are ready"]


def test_memory_without_a_gpu_is_not_pinned() -> None:
    pool = HostPool(LAYOUT, 8)

    assert (pool.is_pinned, pool.chunk_pages) == (False, 0)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("num_pages", [num_device_pages, num_host_pages])
@pytest.mark.parametrize(("size", "expected"), [("30p", 30), ("120", 30), ("16kB", 15)])
def test_sizes_are_pages_tokens_or_bytes(
    num_pages: Callable[..., int], size: str, expected: int, tmp_path: Path
) -> None:
    assert LAYOUT.page_nbytes == 1024

    assert num_pages(size, LAYOUT, root=machine_with(tmp_path, 10**9)) == expected


def test_auto_is_a_share_of_what_the_machine_has(tmp_path: Path) -> None:
    root = machine_with(tmp_path, 64 << 20)

    assert num_host_pages("auto", LAYOUT, root) == (16 << 20) // 1024
    assert num_device_pages("auto", LAYOUT, "cpu", root) == (8 << 20) // 1024


def test_auto_is_a_fraction_of_what_is_free_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 20, 80 << 20))

    assert num_device_pages("auto", LAYOUT, "cuda") == int((10 << 10) * 0.85)
    assert num_device_pages("auto", LAYOUT, "cuda", fraction=0.5) == 5 << 10
    with pytest.raises(ConfigError, match=r"but 0\.0105 GB are available"):
        num_device_pages("20MB", LAYOUT, "cuda")


def test_a_cpu_has_no_node_to_be_near_to() -> None:
    assert node_of(torch.device("cpu")) is None


def test_no_l2_is_a_choice_but_no_l1_is_not(tmp_path: Path) -> None:
    assert num_host_pages("none", LAYOUT) == 0
    with pytest.raises(ConfigError, match=r"cache\.device\.size"):
        num_device_pages("none", LAYOUT)


def test_what_does_not_fit_says_what_was_asked_and_what_there_is(tmp_path: Path) -> None:
    root = machine_with(tmp_path, 2 * 10**9)

    with pytest.raises(ConfigError) as caught:
        num_host_pages("8GB", BIG, root)

    assert str(caught.value) == "cache.host.size: 8GB asks for 7.99 GB, but 2 GB are available"


@pytest.mark.parametrize("size", ["0p", "3", "10B", "auto"])
def test_less_than_a_page_is_an_error(size: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{size} is less than one page of 8,388,608 bytes"):
        num_host_pages(size, BIG, machine_with(tmp_path, 1 << 20))
