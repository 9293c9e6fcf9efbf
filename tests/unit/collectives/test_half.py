"""Rounding to 16 bits, against numpy's cast and against exact arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives.compression import half

ROUNDING = {
    "fp16": (half.round_fp16, half.encode_fp16, half.decode_fp16),
    "bf16": (half.round_bf16, half.encode_bf16, half.decode_bf16),
}
NAN = {"fp16": 0x7E00, "bf16": 0x7FC0}
EDGES = np.array(
    [
        *(0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x33C00000),
        *(0x38000000, 0x387FE000, 0x387FF000, 0x38800000, 0x3F801000, 0x3F803000, 0x3F808000),
        *(0x3F818000, 0x46FFFFFF, 0x47000000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x7F7F7FFF),
        *(0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),
    ],
    np.uint32,
)
"""Zero, denormals, ties, the borders of a normal number and of an overflow, infinity and NaN."""


def expected(kind: str, x: np.ndarray) -> np.ndarray:
    """Return the bits that a slower way gives: numpy's cast, and whole numbers of 64 bits."""
    if kind == "fp16":
        with np.errstate(all="ignore"):
            bits = x.astype(np.float16).view(np.uint16)
    else:
        wide = x.view(np.uint32).astype(np.uint64)
        low, upper = wide & 0xFFFF, wide >> 16
        bits = upper + ((low > 0x8000) | ((low == 0x8000) & (upper % 2 == 1)))
    return np.where(np.isnan(x), NAN[kind], bits).astype(np.uint16)


def check(kind: str, x: np.ndarray) -> None:
    rounded, encode, decode = ROUNDING[kind]
    bits, numbers, in_place = np.empty(x.size, np.uint16), np.empty_like(x), x.copy()
    encode(x, bits)
    np.testing.assert_array_equal(bits, expected(kind, x))
    decode(bits, numbers)
    rounded(in_place, in_place)
    assert in_place.tobytes() == numbers.tobytes()
    assert not np.isfinite(numbers[~np.isfinite(x)]).any()
    rounded(numbers, numbers)
    assert in_place.tobytes() == numbers.tobytes(), "rounding twice changes nothing"


@pytest.mark.parametrize("kind", ROUNDING)
def test_every_kind_of_number_is_rounded_to_nearest_even(kind: str) -> None:
    edges = np.concatenate([EDGES, EDGES | np.uint32(1 << 31)]).view(np.float32)
    check(kind, edges)
    for value in edges:  # alone, as a large one decides how its piece is rounded
        check(kind, value.reshape(1))


@pytest.mark.parametrize("kind", ROUNDING)
def test_every_half_comes_back_as_it_was(kind: str) -> None:
    _, encode, decode = ROUNDING[kind]
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers, again = np.empty(bits.size, np.float32), np.empty_like(bits)
    decode(bits, numbers)
    encode(numbers, again)
    np.testing.assert_array_equal(again, np.where(np.isnan(numbers), NAN[kind], bits))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDING)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 140_000), scale=st.integers(-30, 8))
def test_any_vector_is_rounded_to_nearest_even(kind: str, seed: int, size: int, scale: int) -> None:
    random = np.random.default_rng(seed)
    check(kind, np.ldexp(random.standard_normal(size, np.float32), scale).astype(np.float32))
    check(kind, random.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32))
