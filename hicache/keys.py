"""Page keys: what names a page of KV, everywhere and for ever.

``key[i] = SHA-256(key[i-1] || tokens of page i)``, ``key[-1] = namespace digest``, tokens as
little-endian uint32. A key therefore names a page *and everything before it*: equal keys,
equal bytes. Never Python's ``hash``, which differs from process to process.
"""

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""32-byte chained hash of a page and everything before it."""

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""32-byte digest of a ``Namespace``: the parent key of every first page in it."""

KEY_NBYTES = 32
TOKEN_NBYTES = 4


def pack(token_ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian int32, the form in which tokens travel in HiCache."""
    return array("i", token_ids).tobytes()


def unpack(tokens: bytes) -> list[int]:
    """Return the token ids of packed tokens."""
    return array("i", tokens).tolist()


def chain(parent: bytes, tokens: bytes, page_nbytes: int) -> list[PageKey]:
    """Return the keys of consecutive pages.

    ``parent`` is the key of the page before the first, or the namespace digest.
    ``tokens`` is packed and a whole number of pages of ``page_nbytes`` bytes of tokens.
    """
    assert len(tokens) % page_nbytes == 0
    keys: list[PageKey] = []
    for start in range(0, len(tokens), page_nbytes):
        parent = sha256(parent + tokens[start : start + page_nbytes]).digest()
        keys.append(PageKey(parent))
    return keys


def tokens_of_image(content: bytes, num_positions: int) -> list[int]:
    """Return the token ids by which an image enters a sequence: one for each of its positions.

    31-bit words of SHA-256 in counter mode over the digest of the content, so that other content
    has other tokens at every position, and no image looks like text of small token ids for long.
    """
    digest = sha256(content).digest()
    num_blocks = -(-num_positions * TOKEN_NBYTES // KEY_NBYTES)
    stream = b"".join(sha256(digest + i.to_bytes(8, "little")).digest() for i in range(num_blocks))
    return [word & 0x7FFFFFFF for word in struct.unpack(f"<{num_blocks * 8}I", stream)][
        :num_positions
    ]


@dataclass(frozen=True, slots=True)
class PageRef:
    """What identifies one page: what its record in storage must prove when it is read."""

    key: PageKey
    parent: bytes
    """Key of the page before, or the namespace digest."""
    number: int
    """0 for the first page of a sequence."""
    tokens: bytes
    """The page's tokens, packed."""
