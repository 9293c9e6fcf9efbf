"""Cursors: opaque, and refused when they are not ours."""

import base64
from datetime import UTC, datetime

import pytest

from api.paging import PLACES, decode_cursor, encode_cursor
from api.problems import InvalidRequest
from api.routes import incarnations
from muster.contracts.job import JobId

NO_ZONE = base64.urlsafe_b64encode(b'["2026-01-01T00:00:00","a"]').decode()
NO_ID = base64.urlsafe_b64encode(b'["2026-01-01T00:00:00Z","a\\u0000"]').decode()
PLACE = (datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), JobId("a"))


def test_a_cursor_leads_back_to_its_place() -> None:
    assert decode_cursor(encode_cursor(PLACE), PLACES) == PLACE
    assert decode_cursor(None, PLACES) is None


@pytest.mark.parametrize("text", ["", "x", "é", "bnVsbA", "WzEsMl0", NO_ZONE, NO_ID])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_cursor(text, PLACES)


@pytest.mark.parametrize("place", [[-1, 0], [1 << 31, 0], [0, 1 << 64]])
def test_a_place_among_processes_is_one_that_a_database_takes(place: list[int]) -> None:
    text = encode_cursor((datetime(2026, 1, 2, tzinfo=UTC), *place))
    with pytest.raises(InvalidRequest):
        decode_cursor(text, incarnations.PLACES)
