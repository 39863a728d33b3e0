"""What a scan of the store finds, put together into chains of pages. Pure.

Only headers are noted: per page its tokens and two keys, some 300 bytes.
"""

from collections import defaultdict
from collections.abc import Iterator

from typing_extensions import Buffer

from hicache.codec import PageCodec
from hicache.events import ChainFound
from hicache.keys import NamespaceDigest, PageKey


class Chains:
    """The pages of one namespace, as found, in any order."""

    def __init__(self, codec: PageCodec, namespace: NamespaceDigest) -> None:
        self._codec = codec
        self._namespace = namespace
        self._pages: dict[PageKey, tuple[int, bytes]] = {}
        """Each page's number and tokens."""
        self._children: defaultdict[bytes, list[PageKey]] = defaultdict(list)

    def note(self, key: PageKey, header: Buffer) -> bool:
        """Take the header of one record in; whether it is a page of this namespace.

        What is of another namespace, format or shape, or contradicts itself, is passed over.
        """
        page = self._codec.page_of(key, header, self._namespace)
        if page is None or page.key in self._pages:
            return False
        self._pages[page.key] = (page.number, page.tokens)
        self._children[page.parent].append(page.key)
        return True

    def __iter__(self) -> Iterator[ChainFound]:
        """Yield every longest chain from a first page on, one at a time.

        Pages whose parent is missing are in no chain. Chains that share pages repeat them.
        """
        path: list[PageKey] = []
        stack = [(key, 0) for key in self._following(self._namespace, 0)]
        while stack:
            key, number = stack.pop()
            path[number:] = [key]
            if following := self._following(key, number + 1):
                stack += [(child, number + 1) for child in following]
            else:
                tokens = b"".join([self._pages[page][1] for page in path])
                yield ChainFound(self._namespace, tokens, tuple(path))

    def _following(self, parent: bytes, number: int) -> list[PageKey]:
        """Return the pages after ``parent``, without those that claim another place."""
        return [key for key in self._children.get(parent, ()) if self._pages[key][0] == number]
