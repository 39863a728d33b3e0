"""What a request hit, tier by tier, and why it did not hit more."""

from hicache.actions import Fact, HitTokens, Tier
from hicache.planner.operations import Operation
from hicache.planner.requests import Request
from hicache.planner.residency import Residency
from hicache.tree import Partial


def hit_tokens(
    request: Request, device: int, host: int, partial: Partial | None, source: Operation | None
) -> HitTokens:
    """Return a hit of ``device`` pages in L1, ``host`` in L1 and L2, and a copied part of one.

    What has come to L2 since the request arrived is a hit in L3.
    """
    page_size = request.tree.page_size
    local = max(device, min(host, request.local_pages))
    tokens: dict[Tier, int] = {
        "device": device * page_size,
        "host": (local - device) * page_size,
        "storage": (host - local) * page_size,
    }
    if partial is not None and source is not None:
        is_fetched = source.held_tier == "host" and host == request.fetched_partial
        tokens["storage" if is_fetched else source.held_tier] += partial.num_tokens
    return HitTokens(tokens["device"], tokens["host"], tokens["storage"])


def explain(books: Residency, request: Request, hit: HitTokens) -> None:
    """State what a granted request hit, and why its other pages must be computed."""
    page_size = request.tree.page_size
    tiers: list[tuple[Tier, int]] = [
        ("device", hit.device),
        ("host", hit.host),
        ("storage", hit.storage),
    ]
    for tier, num_tokens in tiers:
        if num_tokens:
            books.facts.append(Fact("hit", tier, "", -(-num_tokens // page_size), request.id))
    end, num_pages = request.committed, len(request.prefix) // request.tree.page_nbytes
    if end == num_pages:
        return
    match = request.tree.match(request.prefix)
    if match.num_pages > end:
        reason = request.unused or ("not_fetched" if books.is_storage_up else "storage_down")
        num_known = match.num_pages - end
        books.facts.append(Fact("missed", _lowest(books), reason, num_known, request.id))
    if match.num_pages < num_pages:
        tree, node = request.tree, match.node
        parent = tree.namespace if node.is_root else node.key(match.inside - 1)
        start = match.num_pages * tree.page_nbytes
        reason = books.ghosts.why(parent, request.prefix[start : start + tree.page_nbytes])
        num_unknown = num_pages - match.num_pages
        books.facts.append(Fact("missed", _lowest(books), reason, num_unknown, request.id))


def _lowest(books: Residency) -> Tier:
    """The tier that would have had a page if any had."""
    if books.config.has_storage:
        return "storage"
    return "host" if books.config.host_pages else "device"
