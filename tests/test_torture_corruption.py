"""Thousands of seeded corruptions of both disk backends, read through ``PageStore``.

Never is a wrong byte served; every damaged page is counted; the rest of each batch is served; and
what was lost can be stored again.
"""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from hicache.keys import PageKey
from hicache.store.counters import StoreStats
from tests.damage import Damager, damage_whole_file
from tests.disk_child import BACKENDS
from tests.disks import MIB
from tests.stores import World, content, page_refs

KINDS = sorted(BACKENDS)
DAMAGES = ("flip", "swap", "zero", "extend", "foreign version", "truncate", "delete")
CHAINS = [page_refs(4, first_token=100 * number) for number in range(12)]
PAGES = [page for chain in CHAINS for page in chain]
KEYS = [page.key for page in PAGES]
BATCHES = [PAGES[start : start + 8] for start in range(0, len(PAGES), 8)]
INDEXES = {"file": ["usage"], "lmdb": ["index", "index-lock"]}
NUM_A_ROUND = 8


class Torture:
    """One store directory, damaged round after round."""

    def __init__(self, kind: str, path: Path, seed: int) -> None:
        self.kind = kind
        self.path = path
        self.random = Random(f"{kind} {seed}")
        self.num_done: Counter[str] = Counter()
        """Corruptions by kind."""
        self.num_looks = 0
        self.num_lost = 0
        """Pages that were not served any more."""

    def run(self, num_corruptions: int) -> None:
        while sum(self.num_done.values()) < num_corruptions:
            with self.world() as world:
                self.fill(world)
                for _ in range(4):
                    self.damage_in_use(world)
            self.damage_closed()

    def world(self) -> World:
        return World(num_pages=256, inner=BACKENDS[self.kind](self.path, 8 * MIB))

    # ------------------------------------------------------------ rounds

    def damage_in_use(self, world: World) -> None:
        done = self.damage_records()

        lost = self.read_all(world)

        self.num_lost += len(lost)
        assert done.lost <= lost, "a damaged page was served"
        assert lost <= done.touched, "a page was lost that nobody touched"
        if done.has_unlinked:
            self.look(world)
        self.fill(world)

    def damage_closed(self) -> None:
        """Damage an index or records; the store opens all the same."""
        name = self.random.choice([*INDEXES[self.kind], None])
        if name is None:
            done = self.damage_records()
            must, may = done.lost, done.touched
        else:
            self.num_done["index"] += 1
            damage_whole_file(self.path / name, self.random)
            must, may = frozenset[PageKey](), frozenset(KEYS if name == "index" else ())
        with self.world() as world:
            lost = self.read_all(world)

            self.num_lost += len(lost)
            assert must <= lost, "a damaged page was served"
            assert lost <= may, "a page was lost that nobody touched"
            self.look(world)
            self.fill(world)

    def damage_records(self) -> Damager:
        """Damage some records; in most rounds their files stay, so that little else is lost."""
        done = Damager(self.path, KEYS, self.random)
        kinds = DAMAGES if self.random.random() < 0.3 else DAMAGES[:5]
        for _ in range(NUM_A_ROUND):
            kind = self.random.choice(kinds)
            self.num_done[kind] += done.damage(kind, self.random.choice(KEYS))
        return done

    # ------------------------------------------------------------ pages

    def read_all(self, world: World) -> frozenset[PageKey]:
        """Return the pages that were not served. Those that were are right, and all are counted."""
        before = world.store.stats()
        lost: list[PageKey] = []
        for batch in BATCHES:
            outcomes = world.fetch_pages(batch)
            for number, (page, is_good) in enumerate(zip(batch, outcomes, strict=True)):
                if is_good:
                    assert world.page(128 + number) == content(page.key), "a wrong byte was served"
                else:
                    lost.append(page.key)
        after = world.store.stats()
        assert lost_pages(after) - lost_pages(before) == len(lost), "a lost page was not counted"
        assert after.errors == before.errors == {}
        return frozenset(lost)

    def look(self, world: World) -> None:
        """Let a file without a name be noticed: its pages count as there until they are missed."""
        self.num_looks += 1
        assert world.store_pages(page_refs(1, first_token=10_000 + self.num_looks)) == [True]
        self.read_all(world)

    def fill(self, world: World) -> None:
        """Store what is not there any more; all of it can be read then."""
        for batch in BATCHES:
            assert all(world.store_pages(batch))
            assert world.fetch_pages(batch) == [True] * len(batch)


def lost_pages(stats: StoreStats) -> int:
    return stats.num_absent_pages + stats.num_corrupt_pages


def torture(kind: str, path: Path, num_corruptions: int, seed: int) -> None:
    done = Torture(kind, path, seed)
    done.run(num_corruptions)

    print(
        f"{kind}: {sum(done.num_done.values())} corruptions {dict(done.num_done)}, "
        f"{done.num_lost} pages lost and counted, no wrong byte"
    )
    assert min(done.num_done[name] for name in DAMAGES) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_corruption_is_served(kind: str, tmp_path: Path) -> None:
    torture(kind, tmp_path / "store", 1_000, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_no_corruption_of_ten_thousand_is_served(kind: str, tmp_path: Path, is_full: bool) -> None:
    torture(kind, tmp_path / "store", 10_000 if is_full else 500, seed=2)
