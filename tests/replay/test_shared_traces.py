"""Every trace beside the checkout, a part of it: the figures of a replay make sense together."""

from functools import cache
from itertools import islice

import pytest

from hicache.tools.replay.optimum import Sharing, find_sharing
from hicache.tools.replay.replaying import replay
from hicache.tools.replay.report import describe_run
from hicache.tools.replay.settings import Hop, Hops, Settings
from hicache.tools.replay.workload import Pace, Workload, load
from hicache.tools.traces.normal import Trace
from hicache.tools.traces.opening import open_trace
from tests.trace_files import real_trace

NUM_REQUESTS = 150
TRACES = [
    "AzureLLMInferenceTrace_2023_conv.csv.gz",
    "mooncake_conversation_trace.jsonl.gz",
    "mt_bench_question.jsonl",
    "tau_bench_airline_40.jsonl.gz",
    "tracelab_example_round_trace.jsonl",
    "weka_claude_code_102.jsonl.gz",
]
HOPS = Hops(*(Hop(nbytes_per_s, 1e-4) for nbytes_per_s in (5e10, 5e10, 2.4e10, 6e9)))


@cache
def part(name: str, is_sequential: bool) -> tuple[Workload, Sharing]:
    """Return the first requests of a trace, and what they share."""
    trace = open_trace(real_trace(name))
    first = Trace(trace.info, lambda: islice(iter(trace), NUM_REQUESTS))
    pace = Pace() if trace.info.has_times else Pace(num_sessions=4)
    workload = load(first, pace=pace, has_outputs=not is_sequential)
    return workload, find_sharing(workload)


@pytest.mark.parametrize("has_tiers", [False, True])
@pytest.mark.parametrize("is_sequential", [True, False])
@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_replayed_and_its_figures_agree(
    name: str, is_sequential: bool, has_tiers: bool
) -> None:
    workload, sharing = part(name, is_sequential)
    room = max(sharing.longest_pages + 2, sharing.num_unique_pages // 8)
    settings = Settings(
        l1=f"{room}p", l2=f"{room}p" if has_tiers else "none", l3="inf" if has_tiers else "none",
        is_sequential=is_sequential, prefill_tokens_per_s=60_000.0,
        decode_tokens_per_s=50.0, hops=HOPS,
    )  # fmt: skip

    replayed = replay(workload, settings, sharing)

    tally = replayed.tally
    hit = sum(outcome.num_hit for outcome in tally.outcomes)
    assert hit + sum(tally.missed.values()) == workload.num_pages
    assert tally.missed["never_seen"] + tally.missed["unfinished"] == (
        workload.num_pages - sum(sharing.seen)
    )
    if not has_tiers:
        assert tally.num_stored == tally.num_fetched == tally.num_loaded == 0
    if has_tiers and is_sequential:
        assert hit == sum(sharing.seen)  # nothing is ever lost, and nobody is ever late
        assert tally.num_stored == sharing.num_unique_pages
    found = describe_run(replayed)
    times = list(found["ttft_s"].values())  # type: ignore[attr-defined]
    assert times == sorted(times)
    assert times[0] > 0
    assert found["hit_rate"]["blocks"]["total"] <= found["optimum"]["infinite"]  # type: ignore[index]
