"""What is exchanged with a log source: event ids, and lines as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.contracts.job.status import JobUid
from muster.logs.source import decode, format_event_id, parse_event_id

UID = JobUid("6f1c2ab9" + "0" * 24)

POSITIONS = st.dictionaries(
    st.integers(0, 4095), st.tuples(st.integers(0, 10**6), st.integers(0, 10**17)), min_size=1
)


@pytest.mark.slow
@given(position=POSITIONS)
def test_a_position_survives_formatting(position: dict[int, tuple[int, int]]) -> None:
    assert parse_event_id(format_event_id(UID, position)) == ("6f1c2ab9", position)


def test_a_position_without_a_job_fits_every_job() -> None:
    assert parse_event_id("0.2:4096") == ("", {0: (2, 4096)})


def test_the_empty_position_is_not_an_empty_id() -> None:
    text = format_event_id(UID, {})
    assert text == "6f1c2ab9/0.0:0"
    assert parse_event_id(text) == ("6f1c2ab9", {0: (0, 0)})


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain", "plain"),
        (b"windows\r", "windows"),
        (b"\r10%\r20%", "20%"),
        (b"10%\r20%\r", "20%"),
        (b"10%\r\r", "10%"),
        (b"\xff", "\ufffd"),
        ("\u00e9".encode(), "\u00e9"),
    ],
)
def test_the_last_state_of_a_line_is_shown(raw: bytes, text: str) -> None:
    assert decode(raw) == text


@given(lines=st.lists(st.text("ab\r\xff", max_size=6).map(lambda line: line.encode("latin-1"))))
def test_many_lines_decode_as_each_does(lines: list[bytes]) -> None:
    assert decode(b"\n".join(lines)) == "\n".join(map(decode, lines))
