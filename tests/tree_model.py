"""A page table too simple to be wrong: each page is named by all tokens up to its end."""

from dataclasses import dataclass

from hicache.keys import PageKey, chain, unpack
from hicache.tree import HiRadixTree, Node, TierPages
from tests.trees import NAMESPACE

Prefix = tuple[int, ...]


@dataclass
class Page:
    """Where a page is: its slots in L1 and L2, or where it is on its way to."""

    device: int | None = None
    host: int | None = None
    is_stored: bool = False
    on_way_to: str | None = None
    num_leases: int = 0


def spell(pages: list[int], page_size: int) -> Prefix:
    """Return the tokens of pages 0 to 15: digits of their numbers, so that pages agree in part."""
    base = {1: 16, 2: 4, 4: 2}[page_size]
    places = range(page_size - 1, -1, -1)
    return tuple(page // base**place % base for page in pages for place in places)


def agreement(one: Prefix, other: Prefix) -> int:
    """Return how many leading tokens are equal."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def prefixes(node: Node) -> list[Prefix]:
    """Return the names of a node's pages."""
    whole = tuple(unpack(b"".join(part.tokens for part in node.path())))
    size = node.tree.page_size
    return [whole[: end * size] for end in range(node.start + 1, node.end + 1)]


def key_of(prefix: Prefix, page_size: int) -> PageKey:
    """Return the key of a page, computed from the root on."""
    return chain(NAMESPACE, b"".join(t.to_bytes(4, "little") for t in prefix), page_size * 4)[-1]


class PageTable(dict[Prefix, Page]):
    """What must be true of a tree."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size

    def path(self, tokens: Prefix) -> list[Page]:
        """Return the leading pages that are known."""
        size, path = self.page_size, []
        for end in range(size, len(tokens) + 1, size):
            if tokens[:end] not in self:
                break
            path.append(self[tokens[:end]])
        return path

    def tiers(self, tokens: Prefix) -> TierPages:
        """Return how far each tier reaches; above a page in L1, all may count as in L1."""
        path = self.path(tokens)
        device = max((n + 1 for n, page in enumerate(path) if page.device is not None), default=0)
        host = device
        while host < len(path) and path[host].host is not None:
            host += 1
        stored = host
        while stored < len(path) and (path[stored].is_stored or path[stored].host is not None):
            stored += 1
        return TierPages(device, host, stored)

    def partial(self, tokens: Prefix) -> int:
        """Return how many tokens of the best next page agree, by looking at every page."""
        start = len(self.path(tokens)) * self.page_size
        return max(
            (
                agreement(page[start:], tokens[start:])
                for page in self
                if len(page) == start + self.page_size and page[:start] == tokens[:start]
            ),
            default=0,
        )


def places(tree: HiRadixTree) -> dict[Prefix, Page]:
    """Return what the tree says, page by page."""
    seen: dict[Prefix, Page] = {}
    for node in tree.nodes():
        device, host = node.device, node.host
        for index, prefix in enumerate(prefixes(node)):
            page = seen[prefix] = Page(num_leases=node.leases, is_stored=index < node.stored)
            if index < len(device.slots):
                page.device = device.slots[index]
            elif index < device.num_pages:
                page.on_way_to = "device"
            if index < len(host.slots):
                page.host = host.slots[index]
            elif index < host.num_pages:
                page.on_way_to = "host"
            if node.stored <= index < node.stored + node.storing:
                page.on_way_to = "storage"
    return seen
