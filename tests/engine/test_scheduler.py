"""The scheduler as what it is: two lists and a few rules."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.engine.detokenizing import Detokenizer
from hicache.engine.generation import Generation
from hicache.engine.outputs import SamplingParams
from hicache.engine.requests import Request
from hicache.engine.sampling import Sampler
from hicache.engine.scheduler import MATCH_EVERY, MAX_OVERTAKEN, WINDOW, Scheduler
from hicache.engine.stopping import Answer
from hicache.events import RequestId
from hicache.keys import pack
from tests.engine.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PAGE_SIZE = 4


def request(
    sequence: int,
    num_tokens: int = 20,
    *,
    num_computed: int = 0,
    num_output: int = 0,
    priority: int = 0,
    tokens: Sequence[int] | None = None,
) -> Request:
    if tokens is None:
        tokens = [1000 * sequence + index for index in range(num_tokens)]
    params = SamplingParams()
    return Request(
        id=RequestId(sequence),
        sequence=sequence,
        tokens=bytearray(pack(tokens)),
        num_prompt_tokens=len(tokens) - num_output,
        generation=Generation(str(sequence), len(tokens), 0.0, lambda: None),
        sampler=Sampler(params),
        answer=Answer(Detokenizer(TOKENIZER), params, ()),
        priority=priority,
        num_computed=num_computed,
    )


def decoding(sequence: int, priority: int = 0) -> Request:
    return request(sequence, 20, num_computed=19, num_output=3, priority=priority)


def scheduler(**settings: object) -> Scheduler:
    return Scheduler(page_size=PAGE_SIZE, **settings)  # type: ignore[arg-type]


def sequences(requests: Sequence[Request]) -> list[int]:
    return [request.sequence for request in requests]


def no_match(request: Request) -> int:
    return 0


def admitted(made: Scheduler, *requests: Request) -> None:
    for item in requests:
        made.add(item)
        made.admit(item)


def test_decodes_come_before_prompts() -> None:
    made = scheduler()
    admitted(made, request(1), decoding(2), request(3), decoding(4))

    assert sequences(made.running_order()) == [2, 4, 1, 3]


def test_decodes_take_turns_where_a_step_is_too_small_for_all() -> None:
    made = scheduler(chunk_tokens=2)
    admitted(made, decoding(1), decoding(2), decoding(3))
    made.running[0].ran_at = 5
    made.running[1].ran_at = 4

    assert sequences(made.running_order()) == [3, 2, 1]


def test_a_chunk_is_what_is_left_of_the_step() -> None:
    made = scheduler(chunk_tokens=16)

    assert made.chunk(request(1, 40), 16) == 16
    assert made.chunk(request(1, 40, num_computed=35), 16) == 5
    assert made.chunk(request(1, 40), 7) == 7


@pytest.mark.parametrize("num_computed", [0, 3, 15, 16, 31, 39])
def test_fixed_chunks_end_at_multiples_whatever_was_hit(num_computed: int) -> None:
    made = scheduler(chunk_tokens=16, fixed_chunks=True)

    end = num_computed + made.chunk(request(1, 40, num_computed=num_computed), 16)

    assert end == min(40, (num_computed // 16 + 1) * 16)


def test_fixed_chunks_give_everybody_a_turn() -> None:
    made = scheduler(fixed_chunks=True)
    admitted(made, decoding(1), request(2))
    made.running[0].ran_at = 7

    assert sequences(made.running_order()) == [2, 1]


def test_first_come_is_first_served_within_a_priority() -> None:
    made = scheduler(policy="fcfs")
    for item in (request(3), request(1), request(2, priority=1), request(0, priority=-1)):
        made.add(item)

    assert sequences(made.waiting_order(no_match)) == [2, 1, 3, 0]


def test_the_longest_match_goes_first_within_a_priority() -> None:
    made = scheduler(policy="lpm")
    for item in (request(1), request(2), request(3, priority=1), request(4)):
        made.add(item)
    hits = {1: 4, 2: 16, 3: 0, 4: 16}

    assert sequences(made.waiting_order(lambda item: hits[item.sequence])) == [3, 2, 4, 1]


def test_a_request_that_many_overtook_goes_first() -> None:
    made = scheduler(policy="lpm", max_batch=1000)
    old = request(0)
    made.add(old)
    for sequence in range(1, MAX_OVERTAKEN + 1):
        assert old.num_overtaken == sequence - 1
        admitted(made, request(sequence))
    young = request(1000)
    made.add(young)

    order = made.waiting_order(lambda item: 16 if item is young else 0)

    assert order == [old, young]


def test_a_more_important_request_overtakes_nobody() -> None:
    made = scheduler()
    old = request(0)
    made.add(old)

    admitted(made, request(1, priority=1))

    assert old.num_overtaken == 0


def test_a_match_is_asked_again_only_now_and_then() -> None:
    made = scheduler(policy="lpm")
    made.add(request(1))
    asked: list[int] = []

    def match(item: Request) -> int:
        asked.append(made.step)
        return 0

    for made.step in range(3 * MATCH_EVERY):
        made.waiting_order(match)

    assert asked == [0, MATCH_EVERY, 2 * MATCH_EVERY]


def test_an_order_looks_at_no_more_than_a_window() -> None:
    made = scheduler(policy="lpm")
    for sequence in range(3 * WINDOW):
        made.add(request(sequence, 4))
    asked: list[int] = []

    def match(item: Request) -> int:
        asked.append(item.sequence)
        return item.sequence

    order = made.waiting_order(match)

    assert len(order) == WINDOW
    assert asked == list(range(WINDOW))


def test_what_a_running_request_computes_just_now_is_waited_for() -> None:
    made = scheduler(policy="lpm")
    tokens = list(range(20))
    first, twin, other = request(1, tokens=tokens), request(2, tokens=tokens), request(3)
    admitted(made, first)
    made.add(twin)
    made.add(other)

    assert made.should_defer(twin)
    assert not made.should_defer(other)
    assert twin.matched_at == -1


def test_what_a_running_request_has_computed_is_not_waited_for() -> None:
    made = scheduler(policy="lpm")
    tokens = list(range(20))
    first = request(1, tokens=tokens, num_computed=8)
    admitted(made, first)

    assert not made.should_defer(request(2, tokens=tokens))


def test_same_tokens_of_another_namespace_are_not_waited_for() -> None:
    made = scheduler(policy="lpm")
    tokens = list(range(20))
    admitted(made, request(1, tokens=tokens))
    stranger = request(2, tokens=tokens)
    stranger.namespace = type(stranger.namespace)(b"other")

    assert not made.should_defer(stranger)


def test_a_preempted_request_keeps_its_place() -> None:
    made = scheduler(policy="fcfs")
    early = request(1)
    admitted(made, early)
    made.add(request(2))

    made.remove(early)
    made.add(early)

    assert sequences(made.waiting_order(no_match)) == [1, 2]
    assert made.running == []


def test_the_victim_is_the_youngest_of_lowest_priority() -> None:
    made = scheduler()
    assert made.victim() is None

    admitted(made, decoding(1, priority=1), decoding(2), decoding(3), decoding(4, priority=1))

    victim = made.victim()
    assert victim is not None
    assert victim.sequence == 3


def test_reasoning_that_history_drops_is_not_shared() -> None:
    thinker = request(1, tokens=[5, 6, 7, 8])
    thinker.reasoning_ids = (90, 91)

    for token_id in (1, 90, 2, 90, 91, 3):
        thinker.append(token_id)

    assert thinker.commit_limit == 7


def test_reasoning_that_the_prompt_begins_is_not_shared() -> None:
    opened = request(1)
    tokens = bytearray(pack([*range(30), 90, 91, 5]))

    thinker = Request(
        id=RequestId(1),
        sequence=1,
        tokens=tokens,
        num_prompt_tokens=33,
        generation=opened.generation,
        sampler=opened.sampler,
        answer=opened.answer,
        reasoning_ids=(90, 91),
    )

    assert thinker.commit_limit == 30


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler against two sets that cannot be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler(max_batch=4)
        self.waiting: set[int] = set()
        self.running: set[int] = set()
        self.next = 0

    @rule(priority=st.integers(-1, 1), matched=st.integers(0, 3))
    def arrive(self, priority: int, matched: int) -> None:
        item = request(self.next, 8, priority=priority)
        item.matched = matched
        self.scheduler.add(item)
        self.waiting.add(self.next)
        self.next += 1

    @precondition(lambda self: self.waiting and self.scheduler.has_room)
    @rule()
    def admit(self) -> None:
        item = self.scheduler.waiting_order(lambda item: item.matched)[0]
        self.scheduler.admit(item)
        self.waiting.remove(item.sequence)
        self.running.add(item.sequence)

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        victim = self.scheduler.victim()
        assert victim is not None
        self.scheduler.remove(victim)
        self.scheduler.add(victim)
        self.running.remove(victim.sequence)
        self.waiting.add(victim.sequence)

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        everybody = [*self.scheduler.waiting, *self.scheduler.running]
        item = everybody[data.draw(st.integers(0, len(everybody) - 1))]
        self.scheduler.remove(item)
        self.waiting.discard(item.sequence)
        self.running.discard(item.sequence)

    @invariant()
    def holds(self) -> None:
        self.scheduler.check()
        assert set(sequences(self.scheduler.waiting)) == self.waiting
        assert set(sequences(self.scheduler.running)) == self.running


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=20, stateful_step_count=30)
