"""Finds the pages under a prefix: those whose sequence, up to their end, begins with it."""

from hicache.codec import Keyring
from hicache.storage import StorageBackend
from hicache.tools.store import reading
from hicache.tools.store.forest import Forest
from hicache.tools.store.sealed import tokens_of
from hicache.tools.store.texts import Prefix


async def tops(
    backend: StorageBackend, forest: Forest, prefix: Prefix, keyring: Keyring | None
) -> list[int]:
    """Return the first pages that are under the prefix; all after them are, too.

    Reads the tokens of the pages on the way; what is sealed with another key cannot be found.
    O(first pages of the namespaces).
    """
    found: list[int] = []
    for namespace, head_nbytes in enumerate(forest.head_nbytes):
        way: dict[int, bytes] = {int(row): b"" for row in forest.roots(namespace)}
        while way:
            heads = await reading.heads(backend, forest.keys(way), head_nbytes)
            following: dict[int, bytes] = {}
            for (row, before), head in zip(way.items(), heads, strict=True):
                tokens = before + (tokens_of(head, keyring) or b"")
                if len(tokens) == len(before):
                    continue  # it has gone meanwhile, or is sealed
                if prefix.is_reached(tokens):
                    found.append(row)
                elif prefix.is_possible(tokens):
                    following |= {int(child): tokens for child in forest.children(row)}
            way = following
    return found
