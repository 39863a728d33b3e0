"""A long walk of random calls, against a model too simple to be wrong: a dict."""

from random import Random

from hicache.testing.checks.registry import Needs, check, check_bounded, check_reopened
from hicache.testing.model import Model
from hicache.testing.records import Subject

NUM_STEPS = 150


@check
async def random_calls_agree_with_a_dict(store: Subject) -> None:
    """Whatever was put, deleted, cancelled and asked before, each answer is a dict's."""
    await _walk(store, "backend")


@check_reopened
async def random_calls_and_restarts_agree_with_a_dict(store: Subject) -> None:
    """The same, with a restart now and then."""
    await _walk(store, "reopen")


@check_bounded
async def random_calls_within_a_budget_agree_with_a_dict(store: Subject) -> None:
    """The same, but what is absent may have been evicted: what is there is right."""
    await _walk(store, "bounded")


async def _walk(store: Subject, needs: Needs) -> None:
    random = Random(needs)
    model = Model(store, may_evict=needs == "bounded")
    steps = [model.put, model.put, model.get, model.get, model.contains, model.delete, model.touch]
    for start in range(0, len(model.names), 8):
        await model.put(model.names[start : start + 8])
    for _ in range(NUM_STEPS):
        names = [random.choice(model.names) for _ in range(random.randrange(1, 6))]
        draw = random.random()
        if draw < 0.8:
            await random.choice(steps)(names)
        elif draw < 0.85:
            await model.cancelled_get(names, random.randrange(6))
        elif draw < 0.9:
            await model.cancelled_put(names, random.randrange(6))
        elif draw < 0.92:
            await model.scan()
        elif draw < 0.94 or needs != "reopen":
            await model.stats()
        else:
            await model.reopen()
        model.check()
    for start in range(0, len(model.names), 8):
        await model.get(model.names[start : start + 8])
