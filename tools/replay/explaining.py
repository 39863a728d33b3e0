"""What happened to one request of a replay, page run by page run."""

from hicache.errors import InputError
from hicache.tools.replay.replaying import Replayed

REASONS = {
    "never_seen": "no request before had them",
    "evicted_from_device": "they had been there, L1 had to drop them",
    "evicted_from_host": "they had been there, L2 had to drop them",
    "evicted_from_storage": "they had been there, L3 had to drop them",
    "not_written_down": "they had been there, and were dropped before they were written down",
    "not_admitted": "one request had used them, and L3 takes pages from the second on",
    "not_fetched": "L3 has them, and they were not fetched in time to be seen",
    "late": "L3 has them, and the request did not wait longer for them",
    "recompute_cheaper": "a lower tier has them, and computing them is sooner done",
    "no_room": "L3 has them, and L2 had no room to fetch them into",
    "computed_meanwhile": "another request was computing them",
    "output_not_kept": "the answer before had them, and L1 had no room to keep it",
    "unfinished": "the last page is not full, and such pages are not kept",
    "refused": "the request is longer than L1",
}


def explain(replayed: Replayed, number: int) -> list[str]:
    """Return lines for people about the request ``number``, counted from 0 in the trace's order.

    Raises ``InputError`` where there is none.
    """
    job = next((job for job in replayed.workload.jobs if job.number == number), None)
    if job is None:
        num_requests = len(replayed.workload.jobs)
        raise InputError(f"--explain {number}: the trace has {num_requests} requests")
    outcome, size = replayed.tally.outcomes[job.index], replayed.workload.page_size
    lines = [
        f"request {number} of session {job.session}: {job.num_input_tokens:,} tokens in "
        f"{job.num_pages:,} pages of {size}, arrived at {outcome.arrived_s:.3f} s"
    ]
    if not outcome.is_refused:
        wait_s = outcome.granted_s - outcome.arrived_s
        lines.append(f"granted after {wait_s:.3f} s, first token after {outcome.ttft_s:.3f} s")
    start = 0
    for tier, num_pages in (
        ("hit in L1", outcome.device),
        ("hit in L2, loaded", outcome.host),
        ("hit in L3, fetched and loaded", outcome.storage),
        *((f"missed, {name}: {REASONS.get(name, name)}", n) for name, n in outcome.missed),
    ):
        if num_pages:
            lines.append(f"pages {start:>6,} to {start + num_pages - 1:>6,}  {tier}")
            start += num_pages
    if outcome.partial:
        tier = {"device": "L1", "host": "L2", "storage": "L3"}[outcome.partial_tier]
        lines.append(f"of page {outcome.num_hit:,}, {outcome.partial:,} tokens were in {tier}")
    return lines
