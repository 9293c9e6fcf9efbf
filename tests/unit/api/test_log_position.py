"""Event ids: a position as text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.logs.files import EventId, format_event_id, parse_event_id
from muster.contracts.job import JobUid

FIRST, SECOND = JobUid("6f1c2ab9" + "0" * 24), JobUid("7" * 32)

POSITIONS = st.dictionaries(
    st.integers(0, 4095), st.tuples(st.integers(0, 10**6), st.integers(0, 10**17)), min_size=1
)


@pytest.mark.slow
@given(position=POSITIONS)
def test_a_position_survives_formatting(position: dict[int, tuple[int, int]]) -> None:
    parsed = parse_event_id(format_event_id(FIRST, position))
    assert parsed == EventId("6f1c2ab9", position)
    assert (parsed.is_of(FIRST), parsed.is_of(SECOND)) == (True, False)


def test_a_position_without_a_job_fits_every_job() -> None:
    parsed = parse_event_id("0.2:4096")
    assert parsed == EventId("", {0: (2, 4096)})
    assert parsed.is_of(SECOND)


def test_the_empty_position_is_not_an_empty_id() -> None:
    text = format_event_id(FIRST, {})
    assert text == "6f1c2ab9/0.0:0"
    assert parse_event_id(text) == EventId("6f1c2ab9", {0: (0, 0)})


@pytest.mark.parametrize(
    "text",
    [
        *["", ",", "0", "0.0", "0.0:", "a.0:0", "0.0:0,", "0.0:1,0.1:2", "-1.0:0"],
        *["\u0660.0:0", "6f1c2ab9/"],
    ],
)
def test_an_invalid_event_id_is_refused(text: str) -> None:
    assert parse_event_id(text) is None
