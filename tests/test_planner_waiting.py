"""How long a request waits for storage, and what if storage comes and goes."""

from hicache.actions import Cancel, Fetch, Grant, HitTokens, Probe, Store, Wait
from hicache.events import (
    ChainFound,
    Finished,
    Flushed,
    Measured,
    Returned,
    StorageDown,
    StorageUp,
    Ticked,
)
from hicache.keys import pack
from hicache.prefetch import UNKNOWN_PATIENCE_S, BestEffort, Timeout
from tests.planner_config import config, words
from tests.planner_scenes import PROMPT, l3_world, restarted
from tests.planner_world import NAMESPACE, World

# ---------------------------------------------------------------- how long to wait


def test_best_effort_waits_five_percent_of_what_computing_would_take() -> None:
    world = l3_world(BestEffort())
    world.step_s = 0.0
    world.send(Measured(10, 100.0))  # 8 tokens: 80 seconds
    request = world.arrive(PROMPT)
    assert isinstance(world.want(request), Wait)
    began = world.now

    world.now = began + 3.9
    assert isinstance(world.want(request), Wait)
    world.now = began + 4.0

    assert isinstance(world.want(request), Grant)
    assert world.why(request) == [("late", 4)]


def test_best_effort_waits_a_little_where_the_prefill_rate_is_unknown() -> None:
    world = l3_world(BestEffort())
    world.step_s = 0.0
    request = world.arrive(PROMPT)
    world.want(request)
    began = world.now

    world.now = began + UNKNOWN_PATIENCE_S / 2
    assert isinstance(world.want(request), Wait)
    world.now = began + UNKNOWN_PATIENCE_S

    assert isinstance(world.want(request), Grant)


def test_timeout_waits_a_base_and_an_amount_for_the_tokens() -> None:
    policy = Timeout(base_s=1.0, per_ki_token_s=2.0)

    assert policy.patience_s(2048, prefill_s=1e9) == 5.0


def test_wait_complete_waits_until_all_is_there() -> None:
    world = l3_world()
    request = world.arrive(PROMPT)
    for _ in range(100):
        assert isinstance(world.want(request), Wait)
        world.now += 1000
    assert world.planner.next_deadline() is None

    world.finish(world.ops(Fetch)[0])

    assert isinstance(world.want(request), Grant)
    assert request.hit == HitTokens(storage=8)


def test_the_planner_says_when_patience_ends_until_it_has() -> None:
    world = l3_world(Timeout(5.0, 0.0))
    world.step_s = 0.0
    assert world.planner.next_deadline() is None
    request = world.arrive(PROMPT)
    world.want(request)
    began = world.now
    assert world.planner.next_deadline() == began + 5.0

    world.now = began + 5.0
    world.send(Ticked())
    assert world.planner.next_deadline() is None

    assert isinstance(world.want(request), Grant)


def test_a_request_that_ends_has_no_deadline() -> None:
    world = l3_world(Timeout(5.0, 0.0))
    request = world.arrive(PROMPT)
    world.want(request)

    world.release(request)

    assert world.planner.next_deadline() is None


def test_what_a_prefetch_fetched_too_late_is_there_for_the_next_request() -> None:
    world = l3_world(BestEffort())
    late = world.arrive(PROMPT)
    world.want(late)
    world.now += 1
    assert isinstance(world.want(late), Grant)
    assert late.hit.total == 0
    world.release(late)

    world.settle()

    assert world.where(PROMPT) == ["23"] * 4
    assert world.start(PROMPT).hit == HitTokens(host=8)


def test_what_has_landed_when_patience_ends_is_used() -> None:
    world = l3_world(BestEffort(), batch_pages=2)
    request = world.arrive(PROMPT)
    world.want(request)
    world.finish(world.ops(Fetch)[0])
    world.now += 1

    assert isinstance(world.want(request), Grant)

    assert request.hit == HitTokens(storage=4)
    assert world.why(request) == [("late", 2)]


def test_a_request_whose_prefetch_is_pending_does_not_block_others() -> None:
    world = l3_world()
    waiting, other = world.arrive(PROMPT), world.arrive(words(300, 4))
    world.finish(world.ops(Probe)[0])

    assert isinstance(world.want(waiting), Wait)
    assert isinstance(world.want(other), Grant)


# ---------------------------------------------------------------- load or recompute


def test_pages_that_are_sooner_computed_are_not_fetched_until_the_link_is_tried_again() -> None:
    world = l3_world()
    slow = world.arrive(PROMPT)
    world.now += 50
    world.finish(world.ops(Fetch)[0])
    world.release(slow)
    world.send(Flushed())
    world.send(Measured(80, 80.0))

    request = world.start(PROMPT)
    assert request.hit.total == 0
    assert world.why(request) == [("recompute_cheaper", 4)]
    world.release(request)
    num_passed_over = 1
    while (request := world.start(PROMPT)).hit.total == 0:
        world.release(request)
        num_passed_over += 1

    assert num_passed_over < 20


# ---------------------------------------------------------------- storage that comes and goes


def test_while_storage_is_down_nothing_is_asked_of_it() -> None:
    world = l3_world()
    world.send(StorageDown())
    before = world.done(Probe) + world.done(Fetch)

    request = world.start([*PROMPT, *words(70, 8)])

    assert world.done(Probe) + world.done(Fetch) == before
    assert world.why(request)[0] == ("storage_down", 4)


def test_a_blocked_fetch_ends_when_storage_goes_down() -> None:
    world = l3_world(host_pages=4, batch_pages=2)
    request = world.arrive(PROMPT)

    world.send(StorageDown())
    world.fail(world.ops(Fetch)[0])

    assert isinstance(world.want(request), Grant)
    assert world.why(request)


def test_storage_that_does_not_exist_does_not_come_up() -> None:
    world = World(config(has_storage=False))

    world.send(StorageUp())
    world.run(PROMPT)

    assert world.done(Probe) == world.done(Store) == 0


def test_a_found_chain_rebuilds_the_tree() -> None:
    world = restarted(l3_world())
    keys = tuple(world.keys_of(NAMESPACE, PROMPT))

    world.send(ChainFound(NAMESPACE, pack(PROMPT[:4]), keys[:2]))
    world.send(ChainFound(NAMESPACE, pack(PROMPT[:8]), keys))
    world.check()

    assert world.where(PROMPT) == ["3"] * 4
    request = world.start(PROMPT)
    assert (request.hit, world.done(Probe)) == (HitTokens(storage=8), 0)


def test_a_found_chain_of_pages_that_are_at_hand_is_believed() -> None:
    world = World(config(write="write_back"))
    world.run(PROMPT)
    keys = tuple(world.keys_of(NAMESPACE, PROMPT))

    world.send(ChainFound(NAMESPACE, pack(PROMPT[:4]), keys[:2]))

    assert world.where(PROMPT) == ["13", "13", "1", "1"]
    world.check()


def test_overdue_pages_stay_lent_until_the_call_has_returned() -> None:
    world = l3_world(host_pages=4)
    request = world.arrive(PROMPT)
    (fetch,) = world.ops(Fetch)
    world.send(Finished(fetch, [False] * 2, is_returned=False))
    world.release(request)
    world.send(Flushed())

    assert world.planner.usage()["host"] == 2
    world.send(Returned(fetch))

    assert world.planner.usage()["host"] == 0
    assert world.done(Cancel) == 0
