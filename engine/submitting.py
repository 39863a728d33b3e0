"""Several prompts as one request: all are queued, or none is."""

from collections.abc import Sequence

from hicache.engine.engine import Engine
from hicache.engine.generation import Generation
from hicache.engine.outputs import SamplingParams
from hicache.errors import HiCacheError, InputError


def submit_all(
    engine: Engine,
    prompts: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    salt: str | None = None,
    priority: int = 0,
    name: str | list[str],
) -> list[Generation]:
    """Queue prompts; raise what ``Engine.submit`` raises, and then none is left behind.

    ``name`` is of the one prompt, or of each, or what their names begin with.
    """
    if isinstance(name, list):
        names = name
    else:
        names = [name] if len(prompts) == 1 else [f"{name}-{i}" for i in range(len(prompts))]
    if len(names) != len(prompts):
        raise InputError(f"{len(names)} names for {len(prompts)} prompts")
    generations: list[Generation] = []
    try:
        for (prompt, params), own in zip(prompts, names, strict=True):
            generations.append(
                engine.submit(prompt, params, salt=salt, priority=priority, request_name=own)
            )
    except HiCacheError:
        for generation in generations:
            generation.abort()
        raise
    return generations
