"""Whatever happens, in any order: the books balance, no page is wrong, and all ends empty."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache.planner import PlannerConfig
from tests.planner_driver import Driver, any_config, run

PICK = st.integers(0, 1 << 16)
MOSTLY_GOOD = st.one_of(st.just(0xFFFF), st.just(0xFFFF), st.integers(0, 0xFFFF))


@st.composite
def configs(draw: st.DrawFn) -> PlannerConfig:
    return any_config(lambda values: draw(st.sampled_from(list(values))))


class PlannerMachine(RuleBasedStateMachine):
    """A planner and a world that carries out what it wants, when told to."""

    driver: Driver

    @initialize(settings=configs())
    def open(self, settings: PlannerConfig) -> None:
        self.driver = Driver(settings)

    @rule(pick=PICK, num_tokens=PICK, bits=PICK, priority=PICK)
    def arrive(self, pick: int, num_tokens: int, bits: int, priority: int) -> None:
        self.driver.arrive(pick, num_tokens, bits, priority)

    @precondition(lambda self: self.driver.waiting)
    @rule(pick=PICK, num_tokens_ahead=st.sampled_from([1, 4, 1000]))
    def want(self, pick: int, num_tokens_ahead: int) -> None:
        self.driver.want(pick, num_tokens_ahead)

    @precondition(lambda self: self.driver.granted)
    @rule(pick=PICK, num_tokens=st.integers(1, 9))
    def compute(self, pick: int, num_tokens: int) -> None:
        self.driver.compute(pick, num_tokens)

    @precondition(lambda self: self.driver.world.running)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.driver.release(pick)

    @precondition(lambda self: self.driver.world.preempted)
    @rule()
    def preempt(self) -> None:
        self.driver.preempt()

    @precondition(lambda self: self.driver.world.pending)
    @rule(pick=PICK, bits=MOSTLY_GOOD)
    def finish(self, pick: int, bits: int) -> None:
        self.driver.finish(pick, bits)

    @precondition(lambda self: self.driver.expirable)
    @rule(pick=PICK)
    def expire(self, pick: int) -> None:
        self.driver.expire(pick)

    @precondition(lambda self: self.driver.world.overdue)
    @rule(pick=PICK)
    def come_back(self, pick: int) -> None:
        self.driver.come_back(pick)

    @precondition(lambda self: self.driver.world.pools.storage)
    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        self.driver.lose(pick)

    @precondition(lambda self: self.driver.world.pools.storage)
    @rule(pick=PICK)
    def find(self, pick: int) -> None:
        self.driver.find(pick)

    @rule(pick=PICK, num_pages=st.integers(0, 4))
    def operate(self, pick: int, num_pages: int) -> None:
        self.driver.operate(pick, num_pages)

    @invariant()
    def holds(self) -> None:
        self.driver.world.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.world.check_empty()


@pytest.mark.slow
def test_any_events_in_any_order_keep_the_books() -> None:
    run_state_machine_as_test(
        PlannerMachine, settings=settings(max_examples=50, stateful_step_count=40)
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_long_random_runs_keep_the_books(first: int) -> None:
    for seed in range(first, first + 20):
        run(seed)


@pytest.mark.soak
@pytest.mark.slow
def test_many_long_random_runs_keep_the_books(is_full: bool) -> None:
    for seed in range(1000, 3000 if is_full else 1020):
        run(seed, num_steps=600)
