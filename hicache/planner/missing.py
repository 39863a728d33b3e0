"""What a request lacks that storage has."""

from dataclasses import dataclass, field

from hicache.keys import TOKEN_NBYTES
from hicache.planner.operations import Operation
from hicache.planner.requests import Request
from hicache.tree import Match, Node


@dataclass(slots=True)
class Missing:
    """Pages that are in neither L1 nor L2, and believed to be in L3."""

    tokens: bytes
    """Of the path that the runs are on."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Pages (first, behind the last) to fetch."""
    partial: int | None = None
    """The last page of the runs, if it is wanted for its first tokens only."""
    joined: list[Operation] = field(default_factory=list)
    """Fetches under way on the path."""
    num_arriving: int = 0
    """Pages that these bring."""

    @property
    def num_pages(self) -> int:
        """Pages to fetch."""
        return sum(last - first for first, last in self.runs)

    def add(self, first: int, last: int) -> None:
        """Add a run behind the others; joins it with the last where they touch."""
        if self.runs and self.runs[-1][1] == first:
            first = self.runs.pop()[0]
        self.runs.append((first, last))

    def join(self, node: Node) -> None:
        """Wait for what fetches are bringing to a node."""
        for claim in node.claims:
            if isinstance(claim, Operation) and claim.brings("fetch", node):
                self.joined.append(claim)
                self.num_arriving += len(node.host.incoming)


def find_missing(request: Request) -> Missing:
    """Return what is to be fetched for a request. O(nodes on its path)."""
    match = request.tree.match(request.prefix)
    missing = Missing(request.prefix)
    for node in match.node.path():
        matched = min(match.num_pages - node.start, node.num_pages)
        if node.host.incoming and len(node.device.slots) < matched:
            missing.join(node)
        at_hand = min(max(node.device.num_pages, node.host.num_pages), matched)
        stored = min(node.stored, matched)
        if at_hand < stored:
            missing.add(node.start + at_hand, node.start + stored)
        assert max(stored, at_hand) == matched
    _add_partial(request, match, missing)
    return missing


def _add_partial(request: Request, match: Match, missing: Missing) -> None:
    """Add the page behind the match, if its first tokens are of use and only storage has it."""
    tree = request.tree
    partial = tree.partial(match, request.tokens[: request.max_hit_tokens * TOKEN_NBYTES])
    if partial is None:
        return
    node, index = partial.node, partial.index
    if max(node.device.num_pages, node.host.num_pages) <= index < node.stored:
        missing.add(match.num_pages, match.num_pages + 1)
        missing.partial = match.num_pages
        missing.tokens = request.prefix[: match.num_pages * tree.page_nbytes] + node.page(index)
