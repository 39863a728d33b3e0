"""``hicache store stat``: what a store holds, namespace by namespace."""

import time
from dataclasses import asdict

from rich.markup import escape

from hicache.storage import StorageBackend, StorageStats
from hicache.tools.store import showing
from hicache.tools.store.naming import Named
from hicache.tools.store.opening import Place
from hicache.tools.store.survey import Share, Survey, survey


async def run(backend: StorageBackend, place: Place, *, is_json: bool) -> int:
    """Show what is there."""
    found = await survey(backend)
    stats = await backend.stats()
    order = sorted(found.shares, key=lambda one: -found.shares[one].nbytes)
    if is_json:
        namespaces = [found.names[one].as_json() | asdict(found.shares[one]) for one in order]
        showing.show_json(
            {
                "backend": place.backend,
                "path": str(place.path),
                "records": found.num_records,
                "nbytes": stats.nbytes,
                "others": dict(found.others),
                "namespaces": namespaces,
            }
        )
        return 0
    table = showing.table(
        "namespace", "model", ">pages", ">size", ">prompts", ">longest", ">oldest", ">used",
        ">reused",
    )  # fmt: skip
    now = time.time()
    for digest in order:
        table.add_row(*_row(found.names[digest], found.shares[digest], now))
    showing.show(_summary(place, found, stats))
    if order:
        showing.show(table)
    return 0


def _row(named: Named, share: Share, now: float) -> list[str]:
    page_size = named.namespace.layout.page_size if named.namespace else None
    longest = f"{share.longest_pages:,} pages"
    if page_size is not None:
        longest = f"{share.longest_pages * page_size:,} tokens"
    reused = "-"
    if share.has_uses and share.num_pages:
        reused = f"{share.num_reused / share.num_pages:.0%}"
    sealed = [f"{share.num_sealed:,} sealed"] if share.num_sealed else []
    return [
        named.short,
        escape("\n".join([named.model, *named.details, *sealed])),
        f"{share.num_pages:,}",
        showing.size(share.nbytes),
        f"{share.num_first:,}",
        longest if share.num_pages else "-",
        _ago(share.first_created, now),
        _ago(share.last_used, now),
        reused,
    ]


def _summary(place: Place, found: Survey, stats: StorageStats) -> str:
    num_pages = sum(share.num_pages for share in found.shares.values())
    parts = [f"{place}: {showing.count(num_pages, 'page')}, {showing.size(stats.nbytes)} on disk"]
    parts += [f"{number:,} {what}" for what, number in sorted(found.others.items())]
    return ", ".join(parts)


def _ago(when: float | None, now: float) -> str:
    return showing.span(None if when is None else max(0.0, now - when))
