"""Worlds in which the pages of a prompt are in one tier only."""

from collections.abc import Sequence
from typing import Unpack

from hicache.events import Flushed
from hicache.prefetch import PrefetchPolicy, WaitComplete
from tests.planner_config import Settings, config, words
from tests.planner_world import World

PROMPT = words(0, 9)
"""Four pages of two tokens, and one more."""


def l2_world(**settings: Unpack[Settings]) -> World:
    """Return a world in which the pages of PROMPT are in L2 only."""
    world = World(config(settings, device_pages=6, has_storage=False))
    world.run(PROMPT)
    world.run(words(100, 12))
    assert world.where(PROMPT) == ["2"] * 4
    return world


def l3_world(
    policy: PrefetchPolicy | None = None,
    prompt: Sequence[int] = PROMPT,
    **settings: Unpack[Settings],
) -> World:
    """Return a world in which the pages of a prompt are in L3 only, and known to be there."""
    world = World(config(settings, prefetch=policy or WaitComplete()))
    world.run(prompt)
    world.send(Flushed())
    assert set(world.where(prompt)) == {"3"}
    return world


def restarted(world: World) -> World:
    """Return a new world over the same storage."""
    fresh = World(world.settings)
    fresh.pools.storage = world.pools.storage
    return fresh
