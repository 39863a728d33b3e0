"""What benchmarks write down: names and units that scripts rely on, and what each is held to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.eviction import POLICIES
from hicache.tools import (
    bench_chat,
    bench_codec,
    bench_keys,
    bench_overhead,
    bench_reuse,
    bench_storage,
    bench_transfer,
    bench_tree,
)
from tests.engine.tiny_models import tiny_model_dir

pytestmark = pytest.mark.slow

Figures = dict[str, dict[str, Any]]


def figures_of(run: Callable[..., int], folder: Path) -> Figures:
    """Return by name what a quick run writes."""
    path = folder / "figures.json"
    assert run(path, is_quick=True) in (0, 1)
    written = json.loads(path.read_text())
    assert written.keys() == {"machine", "figures"}
    found = {figure["name"]: figure for figure in written["figures"]}
    assert len(found) == len(written["figures"]), "a name comes twice"
    for name, figure in found.items():
        assert name == "".join(name.split()), "a space in a name"
        assert {"name", "value", "unit", "limit"} <= figure.keys()
        assert isinstance(figure["limit"], float | int | None)
    return found


def units(figures: Figures, *names: str) -> set[str]:
    """Return the units of figures that must be there."""
    return {figures[name]["unit"] for name in names}


def test_the_tree(tmp_path: Path) -> None:
    figures = figures_of(bench_tree.run, tmp_path)

    matches = [f"tree.match.{name}" for name in ("one_node", "chain", "forest")]
    evictions = [f"tree.evict.{policy}.{num}" for policy in POLICIES for num in (1000, 50_000)]
    times = [*matches, "tree.insert.forest", "tree.lease.forest", *evictions]
    assert units(figures, *times) == {"us"}
    assert figures["tree.match.one_node"]["limit"] == 25


def test_keys(tmp_path: Path) -> None:
    figures = figures_of(bench_keys.run, tmp_path)

    assert units(figures, "keys.page16", "keys.page64") == {"M tokens/s"}
    assert figures["keys.page16"]["limit"] == 15


def test_transfers(tmp_path: Path) -> None:
    figures = figures_of(bench_transfer.run, tmp_path)

    assert units(figures, "transfer.copy", "transfer.copy.64KiB") == {"GB/s"}
    memcpy = figures["transfer.copy.memcpy"]["value"]
    assert figures["transfer.copy"]["limit"] == pytest.approx(0.85 * memcpy)


@pytest.mark.parametrize("backend", ["lmdb", "memory"])
def test_storage(tmp_path: Path, backend: str) -> None:
    def run(path: Path, *, is_quick: bool) -> int:
        return bench_storage.run(path, is_quick=is_quick, backends=[backend], folder=tmp_path)

    figures = figures_of(run, tmp_path)

    for kib in (64, 360):
        prefix = f"storage.{backend}.{kib}"
        rates = [f"{prefix}.{name}" for name in ("write", "read_warm", "read_cold")]
        assert units(figures, *rates) == {"MB/s"}
        assert units(figures, f"{prefix}.contains") == {"us a key"}
    limit = figures[f"storage.{backend}.360.read_warm"]["limit"]
    memcpy = figures[f"storage.{backend}.360.memcpy"]["value"]
    assert limit == (pytest.approx(0.45 * memcpy) if backend == "lmdb" else None)


def test_codecs(tmp_path: Path) -> None:
    model = str(tiny_model_dir(tmp_path, vocab_size=30_000, max_position_embeddings=4096))

    def run(path: Path, *, is_quick: bool) -> int:
        return bench_codec.run(path, is_quick=is_quick, model=model)

    figures = figures_of(run, tmp_path)

    for dtype in ("float32", "bfloat16"):
        for codec in ("none", "zstd1", "zstd-planes1", "none.sealed", "zstd-planes1.sealed"):
            rates = [f"codec.{dtype}.{codec}.{name}" for name in ("encode", "decode", "read")]
            assert units(figures, *rates) == {"GB/s"}
        assert figures[f"codec.{dtype}.zstd-planes1.ratio"]["value"] > 1.05
        assert figures[f"codec.{dtype}.none.ratio"]["value"] == 1


def test_chats(tmp_path: Path) -> None:
    load = bench_chat.Load(
        num_chats=8, num_rounds=4, system_tokens=48, new_tokens=24, answer_tokens=8
    )

    def run(path: Path, *, is_quick: bool) -> int:
        return bench_chat.run(
            path, model=str(tiny_model_dir(tmp_path, vocab_size=30_000)), chats=load
        )

    figures = figures_of(run, tmp_path)

    for tiers in ("l1", "l1l2", "l1l2l3"):
        assert units(figures, f"chat.{tiers}.requests_per_s") == {"1/s"}
        assert units(figures, f"chat.{tiers}.ttft_p50_s") == {"s"}
    assert figures["chat.l1.hit_tokens.host"]["value"] == 0
    assert figures["chat.l1l2.of_l1.computed_tokens"]["value"] < 1


def test_overhead(tmp_path: Path) -> None:
    model = str(tiny_model_dir(tmp_path, vocab_size=30_000, max_position_embeddings=4096))

    def run(path: Path, *, is_quick: bool) -> int:
        return bench_overhead.run(path, is_quick=is_quick, model=model)

    assert 0 < figures_of(run, tmp_path)["overhead.fraction"]["value"] < 1


def test_reuse(tmp_path: Path) -> None:
    figures = figures_of(bench_reuse.run, tmp_path)

    tiers = ("none", "device", "host", "storage")
    assert units(figures, *(f"reuse.ttft.{tier}" for tier in tiers)) == {"s"}
