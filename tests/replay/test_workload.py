"""How a trace becomes requests of pages, and when they arrive."""

import pytest

from hicache.errors import ConfigError
from hicache.keys import unpack
from hicache.tools.replay.optimum import belady, find_sharing
from hicache.tools.replay.workload import Pace, load
from tests.replay.traces import trace_of

SESSIONS = ["a", "a", "b", "b"]
TURNS = [[1], [1, 2], [3], [3, 4]]


def test_smaller_pages_invent_no_hit() -> None:
    trace = trace_of([[1, 2, 3], [1, 2, 4]], block_size=16)

    sharing = find_sharing(load(trace, page_size=4))

    assert sharing.seen == [0, 8]
    assert sharing.num_unique_pages == 16


def test_larger_pages_lose_what_ends_inside_them() -> None:
    trace = trace_of([[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3]], block_size=16)

    sharing = find_sharing(load(trace, page_size=32))

    assert sharing.seen == [0, 1, 0, 1]  # and an unfinished page is not kept
    assert sharing.longest_pages == 2


def test_a_page_size_that_fits_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="must divide the trace's block of 16"):
        load(trace_of([[1]]), page_size=24)


def test_requests_of_one_moment_arrive_in_the_order_of_the_trace() -> None:
    jobs = load(trace_of([[1], [2], [3]], gap_s=0.0)).jobs

    assert [unpack(job.tokens) for job in jobs] == [[1], [2], [3]]
    assert jobs[0].time_s < jobs[1].time_s < jobs[2].time_s


def test_sessions_follow_one_another_where_the_trace_has_no_times() -> None:
    trace = trace_of(TURNS, has_times=False, sessions=SESSIONS, parents=[None, 0, None, 2])

    workload = load(trace)

    assert [job.number for job in workload.jobs] == [0, 1, 2, 3]
    assert workload.jobs[2].time_s > 3.0
    assert [job.after for job in workload.jobs] == [None, 0, 1, 2]
    assert workload.pace == "1 session at once"


def test_so_many_sessions_begin_at_once() -> None:
    trace = trace_of(TURNS[:2] * 2, has_times=False, sessions=SESSIONS, gap_s=0.0)

    jobs = load(trace, pace=Pace(num_sessions=2)).jobs

    assert max(job.time_s for job in jobs) < 0.001


def test_a_session_begins_when_one_before_has_ended_even_if_no_request_has_a_time() -> None:
    trace = trace_of([[n] for n in range(6)], has_times=False, gap_s=0.0)

    jobs = load(trace, pace=Pace(num_sessions=2)).jobs

    assert [job.after for job in jobs] == [None, None, 0, 1, 2, 3]


def test_the_same_seed_lets_sessions_arrive_at_the_same_times() -> None:
    trace = trace_of(TURNS, has_times=False, sessions=SESSIONS)

    first, again, other = (
        [job.time_s for job in load(trace, pace=Pace(sessions_per_s=1.0, seed=seed)).jobs]
        for seed in (1, 1, 2)
    )

    assert first == again != other


def test_a_pace_for_a_trace_with_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="this one has"):
        load(trace_of([[1]]), pace=Pace(num_sessions=2))
    with pytest.raises(ConfigError, match="not both"):
        load(trace_of([[1]], has_times=False), pace=Pace(num_sessions=2, sessions_per_s=1.0))


def test_min_keeps_what_is_used_sooner() -> None:
    sharing = find_sharing(load(trace_of([[1], [2], [3], [1], [2]])))

    assert sum(belady(sharing, 2)) == 1
    assert sum(belady(sharing, 3)) == 2
