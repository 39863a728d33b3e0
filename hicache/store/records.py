"""The records of pages in a backend: under their keys, or the names of these; answers checked."""

from collections.abc import Callable, Sequence

from typing_extensions import Buffer

from hicache.codec import Keyring
from hicache.errors import StorageError
from hicache.keys import PageKey
from hicache.storage import StorageBackend


class WrongAnswer(StorageError):
    """A backend returned something that its contract rules out."""


class Records:
    """What a backend holds, by page key.

    Where pages are sealed, a record has one name for each master key: what is not found under
    the first is looked for under the next, and what is put is put under the first.
    """

    def __init__(self, backend: StorageBackend, keyring: Keyring | None) -> None:
        self._backend = backend
        self._names: list[Callable[[PageKey], PageKey]] = [_itself]
        if keyring is not None:
            self._names = [master.name for master in keyring.masters]

    async def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return which are there."""
        found = [False] * len(keys)
        for name in self._names:
            absent = [at for at, is_there in enumerate(found) if not is_there]
            if not absent:
                break
            asked = [name(keys[at]) for at in absent]
            for at, is_there in zip(absent, await self._contains(asked), strict=True):
                found[at] = is_there
        return found

    async def get(
        self, keys: Sequence[PageKey], into: Sequence[Sequence[memoryview]]
    ) -> list[int | None]:
        """Read records into buffers; return their lengths, ``None`` where absent."""
        lengths: list[int | None] = [None] * len(keys)
        for name in self._names:
            absent = [at for at, length in enumerate(lengths) if length is None]
            if not absent:
                break
            asked = [name(keys[at]) for at in absent]
            answer = await self._backend.get(asked, [into[at] for at in absent])
            for at, length in zip(absent, lengths_in(answer, len(asked)), strict=True):
                lengths[at] = length
        return lengths

    async def put(self, items: Sequence[tuple[PageKey, Sequence[Buffer]]]) -> list[bool]:
        """Store records; return which were accepted."""
        name = self._names[0]
        answer = await self._backend.put([(name(key), buffers) for key, buffers in items])
        return flags_in(answer, len(items))

    async def delete(self, keys: Sequence[PageKey]) -> None:
        """Remove records, under whichever name."""
        for name in self._names:
            await self._backend.delete([name(key) for key in keys])

    async def touch(self, keys: Sequence[PageKey]) -> None:
        """Count records as used, and descriptors, which are always under their own keys."""
        if self._names != [_itself]:
            await self._backend.touch(keys)
        for name in self._names:
            await self._backend.touch([name(key) for key in keys])

    async def _contains(self, keys: list[PageKey]) -> list[bool]:
        return flags_in(await self._backend.contains(keys), len(keys))


def flags_in(answer: object, length: int) -> list[bool]:
    """Return the answer of a backend, if it is the list of booleans that it should be."""
    if not isinstance(answer, list) or len(answer) != length:
        raise WrongAnswer(f"asked for {length} booleans, got {_shape(answer)}")
    flags: list[bool] = [flag for flag in answer if isinstance(flag, bool)]
    if len(flags) != length:
        raise WrongAnswer("asked for booleans, got something else among them")
    return flags


def lengths_in(answer: object, length: int) -> list[int | None]:
    """Return the answer of a backend, if it is the list of lengths that it should be."""
    if not isinstance(answer, list) or len(answer) != length:
        raise WrongAnswer(f"asked for {length} lengths, got {_shape(answer)}")
    lengths: list[int | None] = [
        item for item in answer if item is None or (isinstance(item, int) and item >= 0)
    ]
    if len(lengths) != length:
        raise WrongAnswer("asked for lengths, got something else among them")
    return lengths


def _shape(answer: object) -> str:
    return f"{len(answer)} items" if isinstance(answer, list) else type(answer).__name__


def _itself(key: PageKey) -> PageKey:
    return key
