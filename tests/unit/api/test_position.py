"""Positions: text out, text in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.logs.position import (
    NOWHERE,
    Seen,
    format_event_id,
    format_position,
    parse_event_id,
    parse_position,
)
from muster.contracts.job import JobUid

POSITIONS = st.dictionaries(
    st.integers(0, 4095), st.tuples(st.integers(0, 10**6), st.integers(0, 10**17)), min_size=1
)


@pytest.mark.slow
@given(position=POSITIONS)
def test_a_position_survives_being_written(position: dict[int, tuple[int, int]]) -> None:
    assert parse_position(format_position(position)) == position


def test_the_id_of_an_event_says_of_which_job_it_is() -> None:
    first, second = JobUid("6f1c2ab9" + "0" * 24), JobUid("7" * 32)
    seen = parse_event_id(format_event_id(first, {0: (2, 4096)}))
    assert seen == Seen(mark="6f1c2ab9", position={0: (2, 4096)})
    assert (seen.is_of(first), seen.is_of(second)) == (True, False)


def test_a_position_alone_may_be_of_any_job() -> None:
    seen = parse_event_id("0.2:4096")
    assert seen == Seen(mark="", position={0: (2, 4096)})
    assert seen.is_of(JobUid("7" * 32))
    assert parse_event_id("6f1c2ab9/") is None


def test_nothing_read_is_a_position_too() -> None:
    assert format_position({}) == NOWHERE
    assert parse_position(NOWHERE) == {0: (0, 0)}


@pytest.mark.parametrize(
    "text", ["", ",", "0", "0.0", "0.0:", "a.0:0", "0.0:0,", "0.0:1,0.1:2", "-1.0:0", "\u0660.0:0"]
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_position(text) is None
