"""The promises of `Kind`: bounds of what comes back, and that nothing damaged is added."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives.compression.kinds import KINDS, Compression, kind_of
from muster.collectives.errors import PeerRefused, Unsupported

SPECS: dict[str, Compression] = {
    "float32": "float32",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "sign": "sign",
    "sign of 2 bits": {"kind": "sign", "bits": 2},
    "top 1 %": {"kind": "top_k", "ratio": 0.01},
    "top 1 % as int8": {"kind": "top_k", "ratio": 0.01, "values": "int8"},
    "top half in 2 bits": {"kind": "top_k", "ratio": 0.5, "values": {"kind": "sign", "bits": 2}},
    "random": {"kind": "random", "ratio": 0.1},
    "power_sgd": {"kind": "power_sgd", "rank": 1},
}
HEADER_BYTES = 20
SHAPES = st.sampled_from([(1, 1), (3, 5), (1, 1024), (7, 147), (2, 3, 4), (1030, 170)])


def array_of(seed: int, shape: tuple[int, ...], scale: int = 0) -> np.ndarray:
    draws = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return np.ldexp(draws, scale).astype(np.float32)


def sent(spec: Compression, array: np.ndarray) -> np.ndarray:
    out = np.empty_like(array)
    kind_of(spec).decode(kind_of(spec).encode(array), out)
    return out


def rows(array: np.ndarray, reduce: Callable[..., Any]) -> np.ndarray:
    """Return for each element a fact of the 1,024 that share a scale with it."""
    flat = np.abs(array.reshape(-1)).astype(np.float64)
    facts = [reduce(flat[start : start + 1024]) for start in range(0, flat.size, 1024)]
    return np.repeat(facts, 1024)[: flat.size].reshape(array.shape)


@pytest.mark.slow
@given(seed=st.integers(0, 99), shape=SHAPES, scale=st.integers(-20, 10))
def test_dense_kinds_keep_to_their_bounds(seed: int, shape: tuple[int, ...], scale: int) -> None:
    array = array_of(seed, shape, scale)
    error = {name: np.abs(sent(SPECS[name], array) - array) for name in SPECS}
    assert not error["float32"].any()
    assert (error["fp16"] <= np.maximum(np.abs(array) * 2.0**-11, 2.0**-25)).all()
    assert (error["bf16"] <= np.abs(array) * 2.0**-8).all()
    assert (error["int8"] <= rows(array, np.max) / 253.9).all()
    np.testing.assert_allclose(np.abs(sent("sign", array)), rows(array, np.mean), rtol=1e-5)
    assert np.linalg.norm(error["sign of 2 bits"]) <= np.linalg.norm(error["sign"]) * 1.001


@pytest.mark.slow
@given(
    seed=st.integers(0, 99),
    size=st.integers(1, 140_000),
    ratio=st.sampled_from([1e-9, 1e-3, 0.01, 0.3, 1.0]),
    levels=st.sampled_from([1, 3, 1000]),
)
def test_top_k_keeps_exactly_the_largest_and_first(
    seed: int, size: int, ratio: float, levels: int
) -> None:
    array = np.rint(array_of(seed, (size,)) * levels).astype(np.float32)
    kept = max(1, int(size * ratio))
    order = np.lexsort([np.arange(size), -np.abs(array)])[:kept]
    expected = np.zeros_like(array)
    expected[order] = array[order]
    np.testing.assert_array_equal(sent({"kind": "top_k", "ratio": ratio}, array), expected)


@pytest.mark.slow
def test_random_values_have_the_array_as_their_mean() -> None:
    array, ratio = array_of(1, (1000,)), 0.1
    kind = kind_of({"kind": "random", "ratio": ratio, "seed": 5})
    total, count = np.zeros_like(array), 3000
    for _ in range(count):
        kind.add(kind.encode(array), total)
    assert np.abs(total / count - array).max() < 6 * np.abs(array).max() * (10 / count) ** 0.5
    other, out = kind_of({"kind": "random", "ratio": ratio}, feedback=True), np.zeros_like(array)
    other.add(other.encode(array), out)
    kept = np.flatnonzero(out)
    assert kept.size == 100
    assert out[kept].tobytes() == array[kept].tobytes(), "nothing is divided under feedback"


def test_power_sgd_finds_a_matrix_of_its_rank() -> None:
    matrix = array_of(1, (40, 3)) @ array_of(2, (3, 50))
    kind, out = kind_of({"kind": "power_sgd", "rank": 3}), np.empty_like(matrix)
    kind.decode(kind.encode(matrix), out)
    np.testing.assert_allclose(out, matrix, atol=1e-4)
    full, errors = array_of(3, (40, 50)), []
    for _ in range(4):
        kind.decode(kind.encode(full), out := np.empty_like(full))
        errors.append(float(np.linalg.norm(out - full)))
    assert errors == sorted(errors, reverse=True), "each step goes on from the one before"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("value", [0.0, 1e-42, -3e-39, 1.0, 3e38])
def test_zeros_denormals_and_large_numbers_stay_numbers(spec: Compression, value: float) -> None:
    for shape in [(1, 1), (33, 70)]:
        array = np.full(shape, value, np.float32)
        out = sent(spec, array)
        if spec == "fp16" and value > 1e5:
            assert (out == np.inf).all(), "never a smaller number"
        elif value < 1e30:
            assert np.abs(out).max() <= max(value, 11 * abs(value)), "never more"
        assert kind_of(spec).encode(array).nbytes <= HEADER_BYTES + 12 + array.nbytes * 3


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_becomes_a_number(spec: Compression, value: float) -> None:
    array = array_of(1, (33, 70))
    array[20, 3] = value
    assert np.isnan(sent(spec, array)).all()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_damaged_messages_are_refused_and_add_nothing(spec: Compression) -> None:
    array = array_of(1, (60, 50))
    kind, out = kind_of(spec), np.zeros_like(array)
    message = kind.encode(array)
    draw = np.random.default_rng(0)
    damaged = [message[:size] for size in {0, 1, HEADER_BYTES, message.size - 1}]
    damaged += [np.append(message, np.uint8(0)), draw.integers(0, 256, 500, np.uint8)]
    for _ in range(200):
        flipped = message.copy()
        flipped[draw.integers(flipped.size)] ^= 1 << draw.integers(8)
        damaged.append(flipped)
    damaged += [kind_of(other).encode(array) for other in SPECS.values() if other != spec]
    for data in damaged:
        with pytest.raises(PeerRefused, match="a compressed gradient"):
            kind.add(data, out)
    with pytest.raises(PeerRefused, match="elements"):
        kind.add(message, np.zeros((60, 51), np.float32))
    assert not out.any()


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(data=st.data())
def test_any_body_is_decoded_or_refused(spec: Compression, data: st.DataObject) -> None:
    """A peer that has the token may send anything, with the right digest."""
    kind, out = kind_of(spec), np.zeros((20, 20), np.float32)
    size = kind.encode_body(array_of(1, out.shape)).size
    body = data.draw(st.binary(min_size=size, max_size=size) | st.binary(max_size=2 * size))
    with np.errstate(all="ignore"):
        try:
            kind.add_body(np.frombuffer(body, np.uint8), out, 1)
        except PeerRefused:
            assert not out.any()


REFUSED = [
    ({"kind": "top_k", "ratio": 0}, "ratio of 0"),
    ({"kind": "random", "ratio": 1.5}, "ratio of 1.5"),
    ({"kind": "top_k", "ratio": float("nan")}, "ratio of nan"),
    ({"kind": "top_k", "ratio": 0.1, "values": {"kind": "random", "ratio": 0.1}}, "values"),
    ({"kind": "top_k"}, "ratio"),
    ({"kind": "top_k", "ratio": "1 %"}, "no compression"),
    ({"kind": "sign", "bits": 0}, "0 bits"),
    ({"kind": "power_sgd", "rank": 0}, "rank 0"),
    ("int4", "int4"),
    (7, "7"),
    ({"ratio": 0.1}, "kind"),
]


@pytest.mark.parametrize(("spec", "words"), REFUSED, ids=str)
def test_options_that_cannot_be_are_refused(spec: Compression, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        kind_of(spec)


def test_matrix_below_the_rank_is_refused() -> None:
    with pytest.raises(Unsupported, match="a matrix of 3 x 9 has no rank 4: send it whole"):
        kind_of({"kind": "power_sgd", "rank": 4}).encode(np.ones((3, 3, 3), np.float32))


def test_every_kind_is_tried_here() -> None:
    names = {spec if isinstance(spec, str) else spec["kind"] for spec in SPECS.values()}
    assert names == set(KINDS)
