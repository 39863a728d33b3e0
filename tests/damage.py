"""Damage to the files of a store, of every kind, by seed; and which pages it hits.

Knows where records lie only by looking for their bytes, so it fits any way of laying them out.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from hicache.codec import header_nbytes
from hicache.disk.frame import FRAME_NBYTES, MAGIC
from hicache.keys import PageKey
from tests.stores import PAGE_NBYTES, PAGE_SIZE, content

HEADER_NBYTES = header_nbytes(PAGE_SIZE)
LEAD_NBYTES = FRAME_NBYTES + HEADER_NBYTES
EXTENT_NBYTES = LEAD_NBYTES + PAGE_NBYTES


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a record lies, its frame included."""

    key: PageKey
    path: Path
    start: int
    whole: bytes
    """Its bytes when it was found."""

    @property
    def end(self) -> int:
        return self.start + EXTENT_NBYTES


def locate(folder: Path, keys: Sequence[PageKey]) -> dict[PageKey, list[Extent]]:
    """Return every place where a record lies behind a frame: there may be several of one page."""
    found: dict[PageKey, list[Extent]] = {key: [] for key in keys}
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if path.is_dir():
            for key, extents in locate(path, keys).items():
                found[key] += extents
        elif path.stat().st_size >= EXTENT_NBYTES:
            whole = path.read_bytes()
            for key in keys:
                at = whole.find(content(key))
                while at >= 0:
                    if whole.startswith(MAGIC, at - LEAD_NBYTES):
                        start = at - LEAD_NBYTES
                        found[key].append(Extent(key, path, start, whole[start:][:EXTENT_NBYTES]))
                    at = whole.find(content(key), at + 1)
    return found


class Damager:
    """Damages records one at a time; each call of ``damage`` is one corruption."""

    def __init__(self, folder: Path, keys: Sequence[PageKey], random: Random) -> None:
        self._random = random
        self._places = locate(folder, keys)
        self._by_path: dict[Path, list[Extent]] = {}
        for extents in self._places.values():
            for extent in extents:
                self._by_path.setdefault(extent.path, []).append(extent)
        self._changed: set[Extent] = set()
        self._extended: set[Extent] = set()
        self._unlinked: set[Extent] = set()

    @property
    def lost(self) -> frozenset[PageKey]:
        """Pages that have other bytes now, wherever they lie: none of them may be served."""
        return frozenset(
            key
            for key, extents in self._places.items()
            if extents and all(self._is_damaged(extent) for extent in extents)
        )

    @property
    def touched(self) -> frozenset[PageKey]:
        """Pages that may be lost: a copy of them has other bytes, or a file without a name."""
        return frozenset(extent.key for extent in self._changed | self._unlinked)

    @property
    def has_unlinked(self) -> bool:
        """Whether a file was deleted: right bytes may still come from who has it open."""
        return bool(self._unlinked)

    def damage(self, kind: str, key: PageKey) -> bool:
        """Do one kind of damage to a page's record, or to the file around it; whether it could."""
        extents = [extent for extent in self._places[key] if extent.path.exists()]
        if not extents:
            return False  # its file has gone with an earlier one
        actions: dict[str, Callable[[Extent], None]] = {
            "flip": self._flip,
            "zero": self._zero,
            "foreign version": self._age,
            "swap": self._swap,
            "truncate": self._truncate,
            "extend": self._extend,
            "delete": self._delete,
        }
        actions[kind](self._random.choice(extents))
        return True

    def _is_damaged(self, extent: Extent) -> bool:
        """Whether it was changed, and not changed back: two swaps may undo each other."""
        if extent not in self._changed or extent in self._extended:
            return extent in self._changed
        return not extent.path.exists() or _read(extent) != extent.whole

    def _flip(self, extent: Extent) -> None:
        whole = bytearray(_read(extent))
        if whole:
            whole[self._random.randrange(len(whole))] ^= 1 << self._random.randrange(8)
            self._write(extent, bytes(whole))

    def _zero(self, extent: Extent) -> None:
        whole = _read(extent)
        start = self._random.randrange(EXTENT_NBYTES)
        nbytes = self._random.choice([1, 64, PAGE_NBYTES, EXTENT_NBYTES])
        middle = bytes(len(whole[start : start + nbytes]))
        self._write(extent, whole[:start] + middle + whole[start + nbytes :])

    def _age(self, extent: Extent) -> None:
        """Say that the record, or its frame, is of another version."""
        whole = bytearray(_read(extent))
        at = self._random.choice([7, FRAME_NBYTES + 4])
        whole[at : at + 1] = b"\x63"[: len(whole[at : at + 1])]
        self._write(extent, bytes(whole))

    def _swap(self, extent: Extent) -> None:
        """Exchange two records, their headers and pages, or their pages."""
        others = [extents for key, extents in self._places.items() if extents and key != extent.key]
        other = self._random.choice(self._random.choice(others))
        lead = self._random.choice([0, FRAME_NBYTES, LEAD_NBYTES])
        if not other.path.exists():
            return
        first, second = _read(extent), _read(other)
        if len(first) == len(second) == EXTENT_NBYTES:
            self._write(extent, first[:lead] + second[lead:])
            self._write(other, second[:lead] + first[lead:])

    def _truncate(self, extent: Extent) -> None:
        nbytes = self._random.randrange(extent.start, extent.end)
        if nbytes < extent.path.stat().st_size:
            os.truncate(extent.path, nbytes)
            self._changed.update(one for one in self._by_path[extent.path] if one.end > nbytes)

    def _extend(self, extent: Extent) -> None:
        """Add bytes behind the last record of a file: harmless where several lie in one."""
        with extent.path.open("ab") as file:
            file.write(self._random.randbytes(self._random.randrange(1, 2000)))
        if extent.path.name == extent.key.hex():
            self._changed.add(extent)
            self._extended.add(extent)

    def _delete(self, extent: Extent) -> None:
        extent.path.unlink()
        self._unlinked.update(self._by_path[extent.path])

    def _write(self, extent: Extent, whole: bytes) -> None:
        if _read(extent) == whole:
            return
        with extent.path.open("r+b") as file:
            file.seek(extent.start)
            file.write(whole)
        self._changed.add(extent)


def _read(extent: Extent) -> bytes:
    with extent.path.open("rb") as file:
        file.seek(extent.start)
        return file.read(EXTENT_NBYTES)


def damage_whole_file(path: Path, random: Random) -> None:
    """Damage a file of which anything may be in use."""
    whole = bytearray(path.read_bytes())
    kind = random.choice(["flip", "flips", "truncate", "extend", "zero", "swap", "delete", "other"])
    if kind == "delete" or not whole:
        path.unlink()
        return
    at = random.randrange(len(whole))
    match kind:
        case "flip":
            whole[at] ^= 1 << random.randrange(8)
        case "flips":
            for _ in range(20):
                whole[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        case "truncate":
            del whole[at:]
        case "extend":
            whole += random.randbytes(random.randrange(1, 10_000))
        case "zero":
            whole[at : at + 4096] = bytes(len(whole[at : at + 4096]))
        case "swap":
            other = random.randrange(len(whole))
            for offset in range(min(64, len(whole) - max(at, other))):
                one, two = at + offset, other + offset
                whole[one], whole[two] = whole[two], whole[one]
        case _:
            whole[:] = random.randbytes(len(whole))
    path.write_bytes(whole)
