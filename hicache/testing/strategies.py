"""Hypothesis strategies for what backends are given."""

from hypothesis import strategies as st

from hicache.keys import KEY_NBYTES, PageKey
from hicache.testing.faulty import Chances


def keys() -> st.SearchStrategy[PageKey]:
    """Any key, those that differ in their last byte only among them."""
    spread = st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES)
    near = st.integers(0, 255).map(lambda last: bytes(KEY_NBYTES - 1) + bytes([last]))
    return st.one_of(spread, near).map(PageKey)


def records(max_nbytes: int = 10_000) -> st.SearchStrategy[bytes]:
    """Any record, the empty one and one of zeros among them."""
    sizes = st.integers(0, max_nbytes)
    return st.one_of(sizes.map(bytes), st.binary(max_size=min(max_nbytes, 500)))


def parts(max_nbytes: int = 10_000) -> st.SearchStrategy[list[bytes]]:
    """Any record, in parts as ``put`` is given it."""
    return st.lists(records(max_nbytes // 4), max_size=4)


def batches(max_size: int = 8, max_nbytes: int = 10_000) -> st.SearchStrategy[dict[PageKey, bytes]]:
    """Any batch of different keys, with their records."""
    return st.dictionaries(keys(), records(max_nbytes), max_size=max_size)


def chances(most: float = 0.3) -> st.SearchStrategy[Chances]:
    """How likely each fault of a ``FaultyBackend`` is; hangs are not among them."""
    chance = st.one_of(st.just(0.0), st.floats(0, most))
    return st.builds(
        Chances,
        error=chance,
        lost=chance,
        truncated=chance,
        flipped=chance,
        torn=chance,
        short=chance,
        full=chance,
        delayed=chance,
    )
