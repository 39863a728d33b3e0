"""What a replay counts, on loads small enough to work out by hand."""

from dataclasses import replace

import pytest

from hicache.errors import ConfigError, InputError
from hicache.tools.replay.explaining import explain
from hicache.tools.replay.models import token_nbytes
from hicache.tools.replay.optimum import find_sharing
from hicache.tools.replay.replaying import Replayed, replay
from hicache.tools.replay.report import describe_run
from hicache.tools.replay.settings import Hop, Hops, Settings
from hicache.tools.replay.sweeping import combine, run_all
from hicache.tools.replay.workload import load
from tests.replay.traces import trace_of

CHATS = [[1, 2, 3], [4, 5, 6], [1, 2, 3, 7], [4, 5, 6, 8]]


def run(requests: list[list[int]], settings: Settings, gap_s: float = 1.0) -> Replayed:
    return replay(load(trace_of(requests, gap_s=gap_s)), settings)


def test_hits_are_told_by_tier() -> None:
    replayed = run(CHATS, Settings(l1="4p", l2="8p", is_sequential=True, token_nbytes=10))

    found = describe_run(replayed)
    blocks = found["hit_rate"]["blocks"]  # type: ignore[index]
    assert (blocks["device"], blocks["host"]) == (1 / 14, 5 / 14)
    assert found["bytes"]["host_to_device"] == 5 * 160  # type: ignore[index]
    assert found["misses"] == {"never_seen": 8}


def test_misses_say_which_tier_had_the_pages_last() -> None:
    replayed = run(CHATS, Settings(l1="4p", is_sequential=True))

    assert dict(replayed.tally.missed) == {"never_seen": 8, "evicted_from_device": 5}


def test_what_full_storage_drops_is_a_miss_of_that_tier() -> None:
    settings = Settings(l1="4p", l2="4p", l3="4p", is_sequential=True)

    replayed = run([*CHATS, *CHATS], settings)

    assert replayed.num_evicted_records > 0
    missed = sum(replayed.tally.missed.values())
    hit = sum(outcome.num_hit for outcome in replayed.tally.outcomes)
    assert missed + hit == replayed.workload.num_pages


def test_a_request_longer_than_l1_is_refused_and_counted() -> None:
    replayed = run([[1, 2], [1, 2, 3, 4], [1, 2]], Settings(l1="3p", is_sequential=True))

    found = describe_run(replayed)
    assert found["num_refused_requests"] == 1
    assert found["misses"] == {"never_seen": 2, "refused": 4}
    assert found["hit_rate"]["blocks"]["total"] == 2 / 8  # type: ignore[index]


def test_a_request_runs_when_its_turn_has_come_and_hits_what_was_computed_before() -> None:
    settings = Settings(l1="10p", prefill_tokens_per_s=10.0)

    replayed = run([[1, 2], [1, 2]], settings, gap_s=0.1)

    assert dict(replayed.tally.missed) == {"never_seen": 2}
    # 32 tokens, and then the one of 32 whose logits are needed.
    assert [round(o.ttft_s, 3) for o in replayed.tally.outcomes] == [3.2, 3.2]


def test_what_storage_has_arrives_while_a_request_waits_for_its_turn() -> None:
    hops = Hops(fetch=Hop(nbytes_per_s=16.0 * 10))
    settings = Settings(
        l1="4p", l2="4p", l3="100p", token_nbytes=10, hops=hops, prefill_tokens_per_s=16.0,
        layer_groups=1, low_water=0.0,
    )  # fmt: skip
    requests = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12, 13], [1, 2, 3]]
    workload = load(trace_of(requests, gap_s=100.0))
    *before, last = workload.jobs
    hurried = [*before, replace(last, time_s=before[-1].time_s + 0.1)]

    alone = replay(workload, settings).tally
    queued = replay(replace(workload, jobs=hurried), settings).tally

    # A page is read in a second and computed in a second: nobody waits so long for a page.
    assert alone.outcomes[4].num_hit == 0
    assert queued.outcomes[4].storage == 3


@pytest.mark.parametrize(("groups", "ttft_s"), [(1, 3.5 + 1.0), (4, 3.5 + 0.25)])
def test_layers_compute_while_others_are_loaded(groups: int, ttft_s: float) -> None:
    hops = Hops(load=Hop(nbytes_per_s=16.0 * 10, latency_s=0.5))
    settings = Settings(
        l1="4p", l2="8p", token_nbytes=10, hops=hops, low_water=0.0, prefill_tokens_per_s=16.0,
        layer_groups=groups,
    )  # fmt: skip

    replayed = run([[1, 2, 3], [4, 5, 6, 7], [1, 2, 3, 8]], settings, gap_s=100.0)

    assert replayed.tally.outcomes[2].host == 3
    assert replayed.tally.outcomes[2].ttft_s == pytest.approx(ttft_s)


def test_pages_of_several_blocks_are_hit_to_the_block() -> None:
    trace = trace_of([[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 5]])

    replayed = replay(load(trace, page_size=32), Settings(l1="20p", is_sequential=True))

    first, second, third = replayed.tally.outcomes
    assert (second.num_hit, second.partial) == (1, 16)
    assert (third.num_hit, third.partial) == (2, 0)
    assert first.missed == [("never_seen", 2), ("unfinished", 1)]
    assert third.missed == [("unfinished", 1)]
    found = describe_run(replayed)
    assert found["hit_rate"]["blocks"]["total"] == 3 / 8  # type: ignore[index]
    assert found["hit_rate"]["tokens"]["total"] == (3 * 32 + 16) / 224  # type: ignore[index]


def test_what_was_generated_is_there_for_the_next_turn() -> None:
    trace = trace_of(
        [[1, 2], [1, 2, 3, 4]], sessions=["a", "a"], parents=[None, 0], num_output_tokens=20
    )

    without, with_outputs = (
        replay(load(trace, has_outputs=flag), Settings(l1="20p")) for flag in (False, True)
    )

    assert without.tally.outcomes[1].num_hit == 2
    assert with_outputs.tally.outcomes[1].num_hit == 3
    assert with_outputs.sharing.seen == [0, 3]
    assert sum(with_outputs.tally.missed.values()) == 2 + 1


def test_outputs_take_room() -> None:
    trace = trace_of(
        [[1, 2], [3], [1, 2]], sessions=list("aba"), parents=[None, None, 0], num_output_tokens=40
    )

    runs = [
        replay(load(trace, has_outputs=flag), Settings(l1="4p")).tally for flag in (False, True)
    ]

    assert [run.outcomes[2].num_hit for run in runs] == [2, 1]


def test_an_output_that_was_not_kept_is_a_miss_of_its_own_kind() -> None:
    trace = trace_of(
        [[5, 6], [1, 2], [7, 8], [1, 2, 3, 4]],
        sessions=list("abcb"),
        parents=[None, None, None, 1],
        num_output_tokens=20,
    )

    replayed = replay(load(trace, has_outputs=True), Settings(l1="5p", decode_tokens_per_s=10.0))

    assert replayed.tally.num_lost_output_pages == 1
    assert dict(replayed.tally.missed) == {"never_seen": 7, "output_not_kept": 1}
    assert "L1 had no room to keep it" in explain(replayed, 3)[3]


def test_so_many_sessions_run_at_once_and_no_more() -> None:
    trace = trace_of([[1], [2], [3]], has_times=False, gap_s=0.0)

    replayed = replay(load(trace), Settings(prefill_tokens_per_s=1.0))

    # 16 tokens each: a session that has begun waits for nobody.
    assert [round(o.arrived_s, 3) for o in replayed.tally.outcomes] == [0.0, 16.0, 32.0]


def test_a_load_takes_the_time_of_its_hop() -> None:
    hops = Hops(load=Hop(nbytes_per_s=160.0, latency_s=0.5))
    settings = Settings(l1="4p", l2="8p", token_nbytes=10, hops=hops, low_water=0.0)

    replayed = run([[1, 2, 3], [4, 5, 6], [1, 2, 3]], settings, gap_s=10.0)

    assert replayed.tally.outcomes[2].host == 2
    assert replayed.tally.outcomes[2].ttft_s == pytest.approx(2.5)


def test_a_turn_waits_for_the_one_before_where_the_trace_has_no_times() -> None:
    trace = trace_of(
        [[1], [1, 2]], has_times=False, gap_s=0.0, sessions=["a", "a"], parents=[None, 0]
    )

    replayed = replay(load(trace), Settings(prefill_tokens_per_s=1.0))

    assert [outcome.num_hit for outcome in replayed.tally.outcomes] == [0, 1]
    # 16 tokens each: nobody waits for an answer to a question that was not asked yet.
    assert [round(o.ttft_s, 3) for o in replayed.tally.outcomes] == [16.0, 16.0]


def test_a_sweep_gives_every_combination_and_the_same_as_single_runs() -> None:
    workload = load(trace_of(CHATS))
    runs = combine(Settings(is_sequential=True), ["l1=4p,8p", "eviction=lru,fifo"])

    found = run_all({None: workload}, runs, {None: find_sharing(workload)})

    assert [(run["config"]["l1"], run["config"]["eviction"]) for run in found] == [  # type: ignore[index]
        ("4p", "lru"), ("4p", "fifo"), ("8p", "lru"), ("8p", "fifo"),
    ]  # fmt: skip
    assert found == [describe_run(replay(workload, settings)) for settings in runs]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("l2", "write --sweep"),
        ("colour=red", "not one of l1_gb"),
        ("eviction=best", "not one of lru"),
        ("concurrency=few", "is no whole number"),
        ("concurrency=1.5", "is no whole number"),
        ("prefill_rate=few", "is no number"),
        ("l1=none", "needs an L1"),
        ("l3=inf", "give --l2 a size"),
        ("write=nowhere:policy", "No module named"),
    ],
)
def test_what_cannot_be_swept_is_said(sweep: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        combine(Settings(), [sweep])


def test_one_setting_is_swept_once() -> None:
    with pytest.raises(ConfigError, match="l1 is swept already"):
        combine(Settings(), ["l1_gb=1,2", "l1=4p"])


def test_a_size_in_gb_may_be_left_out_or_without_end() -> None:
    runs = combine(Settings(), ["l1_gb=1,inf", "l2_gb=none,2"])

    assert [(run.l1, run.l2) for run in runs] == [
        ("1GB", "none"), ("1GB", "2GB"), ("inf", "none"), ("inf", "2GB"),
    ]  # fmt: skip


def test_tiers_that_need_each_other_may_be_swept_in_any_order() -> None:
    runs = combine(Settings(l3="inf"), ["l1=4p,8p", "l2=4p"])

    assert [(run.l1, run.l2, run.l3) for run in runs] == [("4p", "4p", "inf"), ("8p", "4p", "inf")]


def test_a_policy_may_come_by_import_path() -> None:
    settings = Settings(l1="4p", eviction="tests.replay.policies:youngest", is_sequential=True)

    replayed = run(CHATS, settings)

    assert sum(outcome.num_hit for outcome in replayed.tally.outcomes) > 0


def test_what_happened_to_a_request_is_told_run_by_run() -> None:
    replayed = run(CHATS, Settings(l1="4p", l2="8p", is_sequential=True))

    lines = explain(replayed, 2)

    assert lines[2:] == [
        "pages      0 to      0  hit in L1",
        "pages      1 to      2  hit in L2, loaded",
        "pages      3 to      3  missed, never_seen: no request before had them",
    ]
    with pytest.raises(InputError, match="has 4 requests"):
        explain(replayed, 4)


@pytest.mark.parametrize(
    ("model", "dtype", "nbytes"),
    [
        ("llama-3.1-8b", "bf16", 131_072),
        ("llama-2-7b", "fp16", 524_288),
        ("deepseek-v3", "bf16", 70_272),
        ("deepseek-v3", "fp8", 35_136),
    ],
)
def test_a_token_of_a_known_model_has_its_bytes(model: str, dtype: str, nbytes: int) -> None:
    assert token_nbytes(model, dtype) == nbytes
