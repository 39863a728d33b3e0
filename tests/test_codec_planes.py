"""Pages made smaller: what goes in comes out, and nothing else does."""

import struct
from random import Random

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.codec.planes import Planes
from hicache.errors import CorruptPage

NBYTES = 4096
PLANES = (1, 2, 4)
MARK = b"\xa5" * NBYTES


def floats(num_planes: int, seed: int = 0) -> bytes:
    """Return a page of numbers whose last bytes are alike, as exponents are."""
    random = Random(seed)
    items = np.frombuffer(random.randbytes(NBYTES), np.uint8).reshape(-1, num_planes).copy()
    items[:, -1] = 0x3C + items[:, -1] % 4
    return items.tobytes()


def coded(num_planes: int, page: bytes, level: int = 1) -> bytearray:
    target = bytearray(NBYTES)
    length = Planes(NBYTES, level).encode(num_planes, memoryview(page), memoryview(target))
    assert length is not None
    return target[:length]


def decoded(num_planes: int, form: bytes | bytearray, planes: Planes | None = None) -> bytes:
    page = bytearray(MARK)
    try:
        (planes or Planes(NBYTES)).decode(num_planes, memoryview(form), memoryview(page))
    except CorruptPage:
        assert page == MARK, "the page was written"
        raise
    return bytes(page)


@settings(max_examples=50)
@given(
    num_planes=st.sampled_from(PLANES),
    values=st.binary(min_size=1, max_size=64),
    seed=st.integers(0, 1000),
    level=st.sampled_from([1, 3, 9, 19]),
)
def test_what_is_coded_comes_back(num_planes: int, values: bytes, seed: int, level: int) -> None:
    page = bytes(Random(seed).choices(values, k=NBYTES))
    target = bytearray(NBYTES)

    length = Planes(NBYTES, level).encode(num_planes, memoryview(page), memoryview(target))

    if length is not None:
        assert length < NBYTES
        assert decoded(num_planes, target[:length]) == page
        assert decoded(num_planes, target[:length] + bytes(50)) == page


@pytest.mark.parametrize("num_planes", [2, 4])
def test_only_the_plane_of_exponents_gets_smaller(num_planes: int) -> None:
    page = floats(num_planes)

    form = coded(num_planes, page)

    lengths = struct.unpack_from(f"<{num_planes}I", form, 8)
    assert lengths[:-1] == (NBYTES // num_planes,) * (num_planes - 1)
    assert lengths[-1] < NBYTES // num_planes / 2
    assert decoded(num_planes, form) == page


@pytest.mark.parametrize("num_planes", PLANES)
def test_noise_is_not_worth_it(num_planes: int) -> None:
    noise = memoryview(Random(1).randbytes(NBYTES))

    assert Planes(NBYTES).encode(num_planes, noise, memoryview(bytearray(NBYTES))) is None


@pytest.mark.parametrize("num_planes", PLANES)
def test_r13_a_flip_anywhere_is_found_or_changes_nothing(num_planes: int) -> None:
    """Frames have a few bits that say nothing; those are found by the record's checksum."""
    page = floats(max(num_planes, 2))
    form = coded(num_planes, page)
    planes, num_found = Planes(NBYTES), 0

    for offset in range(len(form)):
        form[offset] ^= 0x40
        try:
            assert decoded(num_planes, form, planes) == page
        except CorruptPage:
            num_found += 1
        form[offset] ^= 0x40

    assert num_found > len(form) - 20
    assert decoded(num_planes, form, planes) == page


@pytest.mark.parametrize("num_planes", PLANES)
def test_what_is_cut_short_is_found(num_planes: int) -> None:
    form = coded(num_planes, floats(max(num_planes, 2)))
    planes = Planes(NBYTES)

    for length in range(len(form)):
        with pytest.raises(CorruptPage):
            decoded(num_planes, form[:length], planes)


@given(noise=st.binary(max_size=2 * NBYTES), num_planes=st.sampled_from(PLANES))
def test_noise_is_no_page(noise: bytes, num_planes: int) -> None:
    with pytest.raises(CorruptPage):
        decoded(num_planes, noise)


@pytest.mark.parametrize("size", [0, NBYTES - 1, NBYTES + 1, 100_000_000])
def test_a_frame_of_another_length_is_found_and_does_not_grow(size: int) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(size))

    with pytest.raises(CorruptPage, match="codec: a plane that is not of 4096 bytes"):
        decoded(1, struct.pack("<QI", 0, len(frame)) + frame)


def test_a_frame_that_asks_for_much_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    frame = compressor.compressobj().compress(bytes(10)) + compressor.compressobj().flush()

    with pytest.raises(CorruptPage, match=r"codec: .*"):
        decoded(1, struct.pack("<QI", 0, len(frame)) + frame)


def test_a_page_of_which_there_are_no_such_planes_is_refused() -> None:
    page = bytearray(6)

    with pytest.raises(CorruptPage, match="4 planes"):
        Planes(6).decode(4, memoryview(bytes(30)), memoryview(page))
