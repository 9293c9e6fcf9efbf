"""Differences between states, and the identity of a state."""

import numpy as np
import pytest

from muster.checkpoints.comparison import Difference, differences, identity, identity_of
from muster.contracts.shards import Position
from tests.support.checkpoint_ranks import Rank, owner, position, state

ONES = np.ones((2, 2), np.float32)


def test_equal_states_have_no_differences() -> None:
    state = {"w": ONES, "nan": np.full(2, np.nan), "loss": float("nan"), "at": (1, [2.0]), "n": 1}
    assert not differences(state, {**state, "w": ONES.copy()})
    assert not differences({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}})


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
def test_array_difference_counts_elements(
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
def test_difference_of_type_is_described(
    first: dict[str, object], second: dict[str, object], said: tuple[str | None, str | None]
) -> None:
    assert differences(first, second) == [Difference(name="a", first=said[0], second=said[1])]


BASE = {"w": np.arange(6, dtype=np.float32), "lr": 0.1, "epochs": [1, 2]}
CHANGES = {
    "a bit": {"w": np.nextafter(BASE["w"], 9)},
    "the shape": {"w": BASE["w"].reshape(2, 3)},
    "the dtype": {"w": BASE["w"].view(np.int32)},
    "a value": {"lr": 0.2},
    "a type": {"epochs": [1, 2.0]},
    "a name": {"lr": None, "rate": 0.1},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_identity_changes_with_any_difference(change: dict[str, object]) -> None:
    assert identity({**BASE, **change}, Position()) != identity(BASE, Position())
    assert identity(BASE, Position(step=1)) != identity(BASE, Position())


def test_identity_ignores_order_and_memory_layout() -> None:
    matrix = np.arange(6.0).reshape(2, 3)
    one = {"a": matrix, "b": {"x": 1, "y": 2}}
    other = {"b": {"y": 2, "x": 1}, "a": np.asfortranarray(matrix)}
    assert identity(one, Position()) == identity(other, Position())


def test_identity_ignores_the_generation() -> None:
    ranks = [Rank(owner=owner(generation=generation)) for generation in (0, 5)]
    for rank in ranks:
        rank.manager.save(3, position(3), state(0, 3))
    first, second = (rank.manager.restore() for rank in ranks)
    assert identity_of(first) == identity_of(second) == identity(state(0, 3), position(3))
