"""Arrays are compatible with safetensors, and values round-trip through JSON."""

import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.format import (
    COUNTER,
    DTYPES,
    FLOAT,
    ITEMS,
    TUPLE,
    Array,
    decode_arrays,
    encode_arrays,
    from_json,
    to_json,
)

ANY_ARRAY = st.sampled_from(list(DTYPES)).flatmap(
    lambda dtype: npst.arrays(
        dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    )
)
ANY_NAME = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__")
ANY_ARRAYS = st.dictionaries(ANY_NAME, ANY_ARRAY, max_size=5)


def encoded(arrays: dict[str, Array]) -> bytearray:
    return bytearray().join(encode_arrays(arrays))


def assert_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.slow
@settings(derandomize=True, max_examples=80)
@given(ANY_ARRAYS)
def test_arrays_round_trip_with_safetensors(arrays: dict[str, Array]) -> None:
    content = encoded(arrays)
    assert_same(safetensors.numpy.load(bytes(content)), arrays)
    assert_same(decode_arrays(content, "f"), arrays)
    theirs = safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})
    found = decode_arrays(bytearray(theirs), "f")
    assert_same(found, {n: np.ascontiguousarray(a) for n, a in arrays.items()})


def test_array_file_layout() -> None:
    content = encoded({"b": np.ones(2, np.float32), "a": np.zeros(3, np.uint8)})
    (length,) = struct.unpack_from("<Q", content)
    header = msgspec.json.decode(content[8 : 8 + length])
    assert length % 8 == 0
    assert list(header) == ["a", "b"]
    assert header["a"] == {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    assert header["b"] == {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}


def test_non_contiguous_arrays_are_saved_in_c_order() -> None:
    base = np.arange(24).reshape(4, 6)
    arrays = {"transposed": base.T, "strided": base[::2, ::3], "fortran": np.asfortranarray(base)}
    assert_same(decode_arrays(encoded(arrays), "f"), arrays)


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.zeros(10)
    _, memory = encode_arrays({"a": array})
    array[3] = 1.0
    assert bytes(memory) == array.tobytes()


def test_restored_arrays_are_aligned_and_writeable() -> None:
    arrays = decode_arrays(encoded({"a": np.zeros(3, np.bool_), "b": np.zeros(3)}), "f")
    arrays["b"] += 1.0
    assert arrays["b"].flags.aligned
    assert arrays["a"].flags.writeable


def described(data: bytes = b"\0" * 8, **entries: object) -> bytearray:
    header = msgspec.json.encode(entries)
    return bytearray(struct.pack("<Q", len(header)) + header + data)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


LIES = {
    "nothing": bytearray(),
    "half a length": bytearray(4),
    "a header longer than the file": bytearray(struct.pack("<Q", 2**63)) + b"{}",
    "no JSON": bytearray(struct.pack("<Q", 2)) + b"{]",
    "a metadata block": described(b"", __metadata__={"a": "b"}),
    "an unknown type": described(a=entry("Q8", [8], 0, 8)),
    "more elements than bytes": described(a=entry("F64", [2], 0, 8)),
    "huge shapes": described(a=entry("F64", [2**62, 2**62], 0, 8)),
    "negative shapes": described(a=entry("F64", [-1, -1], 0, 8)),
    "offsets past the end": described(a=entry("F64", [2], 0, 16)),
    "negative offsets": described(a=entry("F64", [1], -8, 0)),
    "a hole": described(a=entry("U8", [4], 4, 8)),
    "an overlap": described(a=entry("U8", [6], 0, 6), b=entry("U8", [6], 2, 8)),
    "bytes of no array": described(a=entry("U8", [4], 0, 4)),
}


@pytest.mark.parametrize("content", LIES.values(), ids=list(LIES))
def test_invalid_array_file_is_refused(content: bytearray) -> None:
    with pytest.raises(CheckpointDamaged, match="the file"):
        decode_arrays(content, "the file")


# Hypothesis tries strings of the modules that are loaded, such as these.
KEYS = st.text().filter(lambda key: key not in {COUNTER, FLOAT, ITEMS, TUPLE})
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


def round_trip(value: object) -> Any:  # noqa: ANN401  of the same type
    return from_json(msgspec.json.decode(msgspec.json.encode(to_json(value, "v"))))


def exactly(value: object) -> str:
    # repr tells 1 from 1.0 and True, a tuple from a list, -0.0 from 0.0, and equals itself for NaN.
    return repr(value)


@pytest.mark.slow
@settings(derandomize=True, max_examples=120)
@given(VALUES)
def test_values_round_trip(value: object) -> None:
    assert exactly(round_trip(value)) == exactly(value)


def test_nan_and_tuples_have_reserved_keys() -> None:
    assert round_trip([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert math.isnan(round_trip(math.nan))
    assert to_json((1, math.nan), "v") == {"__tuple__": [1, {"__float__": "nan"}]}
