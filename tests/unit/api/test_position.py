"""Positions: text out, text in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.logs.position import NOWHERE, format_position, parse_position

POSITIONS = st.dictionaries(
    st.integers(0, 4095), st.tuples(st.integers(0, 10**6), st.integers(0, 10**17)), min_size=1
)


@pytest.mark.slow
@given(position=POSITIONS)
def test_a_position_survives_being_written(position: dict[int, tuple[int, int]]) -> None:
    assert parse_position(format_position(position)) == position


def test_nothing_read_is_a_position_too() -> None:
    assert format_position({}) == NOWHERE
    assert parse_position(NOWHERE) == {0: (0, 0)}


@pytest.mark.parametrize(
    "text", ["", ",", "0", "0.0", "0.0:", "a.0:0", "0.0:0,", "0.0:1,0.1:2", "-1.0:0", "\u0660.0:0"]
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_position(text) is None
