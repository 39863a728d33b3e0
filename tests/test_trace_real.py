"""Real traces beside the checkout, and what is known of them from elsewhere."""

import json
import subprocess
import sys

import pytest

from hicache.tools.traces.opening import open_trace
from hicache.tools.traces.summary import Summary, summarise
from tests.trace_files import SHARED, real_trace


def read(name: str) -> tuple[str, Summary]:
    trace = open_trace(real_trace(name))
    summary = summarise(trace.info, trace)
    assert trace.info.num_bad_lines == 0
    return trace.info.format, summary


def test_the_mooncake_conversations_are_those_of_the_oracle() -> None:
    name = "mooncake_conversation_trace.jsonl.gz"
    trace = open_trace(real_trace(name))
    oracle = json.loads((SHARED / "oracles" / "conversation_replay.json").read_text())
    facts = oracle["facts"]

    summary = summarise(trace.info, trace)

    assert trace.info.format == "mooncake"
    assert trace.info.block_size == facts["block_tokens"]
    assert summary.num_requests == facts["requests"]
    assert summary.num_block_references == facts["block_refs"]
    assert summary.num_blocks == facts["unique_blocks"]
    assert round(summary.num_input_tokens / summary.num_requests, 1) == facts["mean_input_tokens"]
    assert summary.last_s == facts["last_timestamp_ms"] / 1000
    assert summary.is_in_order
    infinite = oracle["one_tier_block_hit_rate"]["lru_flat"][0]
    assert round(summary.block_optimum, 4) == infinite
    assert round(summary.token_optimum, 4) == oracle["other_denominators_at_inf"]["tokens"]


def test_the_ids_of_the_mooncake_conversations_are_chained_already() -> None:
    path = real_trace("mooncake_conversation_trace.jsonl.gz")
    last = -1

    for request in open_trace(path):
        # A new block has the next number, as in the file itself; block 0 is in every request.
        assert request.blocks[0] == 0
        assert all(block <= last + index for index, block in enumerate(request.blocks, start=1))
        last = max(last, max(request.blocks))

    assert last == 182_789


@pytest.mark.slow
def test_the_agent_sessions_have_as_many_requests_and_references_as_is_known() -> None:
    kind, summary = read("weka_claude_code_102.jsonl.gz")

    assert kind == "agent-sessions"
    assert summary.num_requests == 7146
    assert len(summary.sessions) == 102
    # 14,334,264 full blocks have ids; 7,042 requests end in a partial one, which has none.
    assert summary.num_block_references == 14_334_264 + 7042
    assert summary.num_blocks == 503_432


@pytest.mark.slow
def test_the_agent_sessions_need_little_memory() -> None:
    path = real_trace("weka_claude_code_102.jsonl.gz")
    script = (
        "import resource, sys\n"
        "from hicache.tools.traces.opening import open_trace\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for request in open_trace(sys.argv[1]): pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    # The largest session is 4 MB of JSON: a million ids as Python numbers.
    assert int(done.stdout) < 150_000


def test_azure_conversations() -> None:
    kind, summary = read("AzureLLMInferenceTrace_2023_conv.csv.gz")

    assert (kind, summary.num_requests) == ("azure", 19_366)
    assert summary.block_optimum == 0
    assert summary.is_in_order


def test_rounds_of_tracelab() -> None:
    kind, summary = read("tracelab_example_round_trace.jsonl")

    assert (kind, summary.num_requests, len(summary.sessions)) == ("tracelab", 19, 2)
    assert summary.num_input_tokens == 514_012
    # What the provider had itself, but for its cache of the first rounds and whole blocks.
    assert summary.token_optimum == pytest.approx(0.853, abs=0.001)


def test_questions_of_mt_bench() -> None:
    kind, summary = read("mt_bench_question.jsonl")

    assert (kind, summary.num_requests, len(summary.sessions)) == ("mt-bench", 160, 80)


def test_message_lists_of_tau_bench_share_their_system_prompt() -> None:
    path = real_trace("tau_bench_airline_40.jsonl.gz")
    requests = list(open_trace(path))

    assert len({request.session for request in requests}) == 40
    num_shared = 6155 // (64 * 4)
    assert len({tuple(request.blocks[:num_shared]) for request in requests}) == 1
