"""What differs between two states, to the last bit."""

import numpy as np
import pytest

from muster.checkpoints.comparison import Difference, differences

ONES = np.ones((2, 2), np.float32)


def test_equal_bits_differ_in_nothing() -> None:
    state = {"w": ONES, "nan": np.full(2, np.nan), "loss": float("nan"), "at": (1, [2.0]), "n": 1}
    assert not differences(state, {**state, "w": ONES.copy()})


@pytest.mark.parametrize(
    ("first", "second", "elements", "largest"),
    [
        (ONES, ONES + np.float32([[0, 0.5], [0, 0.25]]), 2, 0.5),
        (np.zeros(3), np.array([0.0, -0.0, 0.0]), 1, 0.0),
        (np.zeros(2), np.array([np.nan, 1.0]), 2, None),
        (np.array([True, False]), np.array([True, True]), 1, 1.0),
        (np.array(3), np.array(5), 1, 2.0),
        (np.array([0], np.uint8), np.array([255], np.uint8), 1, 255.0),
    ],
    ids=["floats", "minus zero", "no number", "bools", "without dimensions", "unsigned"],
)
def test_arrays_differ_by_elements_and_by_how_much(
    first: np.ndarray, second: np.ndarray, elements: int, largest: float | None
) -> None:
    [one] = differences({"a": first, "same": 1}, {"a": second, "same": 1})
    assert (one.name, one.elements, one.largest) == ("a", elements, largest)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"a": 1}, {"a": True}, ("1", "True")),
        ({"a": 1.0}, {"a": 1}, ("1.0", "1")),
        ({"a": 1}, {}, ("1", None)),
        ({}, {"a": ONES}, (None, "float32 2x2")),
        ({"a": ONES}, {"a": ONES.astype(np.float64)}, ("float32 2x2", "float64 2x2")),
        ({"a": np.array(1)}, {"a": 1}, ("int64 scalar", "1")),
    ],
)
def test_what_is_something_else_is_described(
    first: dict[str, object], second: dict[str, object], said: tuple[str | None, str | None]
) -> None:
    assert differences(first, second) == [Difference(name="a", first=said[0], second=said[1])]


def test_the_order_of_keys_is_no_difference() -> None:
    assert not differences({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}})
