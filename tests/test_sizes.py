"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.sizes import Size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("30000p", Size(30_000, "pages")),
        ("1.5kp", Size(1_500, "pages")),
        ("2M", Size(2_000_000, "tokens")),
        ("4096", Size(4_096, "tokens")),
        ("8GB", Size(8 * 10**9, "bytes")),
        ("0.3GB", Size(300_000_000, "bytes")),
        ("1.001KB", Size(1_001, "bytes")),
        (" 2 TB ", Size(2 * 10**12, "bytes")),
        ("512B", Size(512, "bytes")),
    ],
)
def test_a_size_is_a_number_a_factor_and_a_unit(text: str, size: Size) -> None:
    assert Size.parse(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "8 apples", "-1GB", "8GiB", "1e9", "8gb", "1,5GB", "٣p"]
)
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no size: write 30000p \(pages\), 2M \(tokens\) or"):
        Size.parse(text)


@pytest.mark.parametrize(
    ("text", "num_pages", "nbytes"),
    [("3p", 3, 3_000), ("100", 6, 6_000), ("3500B", 3, 3_500), ("999B", 0, 999), ("15", 0, 0)],
)
def test_pages_are_whole_and_bytes_are_as_written(text: str, num_pages: int, nbytes: int) -> None:
    size = Size.parse(text)

    assert size.num_pages(page_size=16, page_nbytes=1_000) == num_pages
    assert size.nbytes(page_size=16, page_nbytes=1_000) == nbytes


@given(st.integers(0, 10**12), st.sampled_from(["p", "", "B"]), st.integers(1, 256))
def test_its_pages_never_take_more_bytes_than_it_has(
    amount: int, unit: str, page_size: int
) -> None:
    size = Size.parse(f"{amount}{unit}")

    num_pages = size.num_pages(page_size, page_nbytes=page_size * 7)

    assert num_pages * page_size * 7 <= size.nbytes(page_size, page_nbytes=page_size * 7)
