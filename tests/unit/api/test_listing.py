"""Cursors of pages, and entity tags in every form that HTTP allows."""

import base64
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from api.errors import InvalidRequest
from api.listing import (
    PLACES,
    decode_cursor,
    encode_cursor,
    reply_tagged,
    required_version,
)
from api.routes import jobs
from api.views import job_tag, job_view
from database.errors import JobChanged
from muster.contracts.job import JobId
from tests.unit.api.jobs import JOB

NO_ZONE = base64.urlsafe_b64encode(b'["2026-01-01T00:00:00","a"]').decode()
NO_ID = base64.urlsafe_b64encode(b'["2026-01-01T00:00:00Z","a\\u0000"]').decode()
PLACE = (datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), JobId("a"))
TAG = '"u.1"'


def test_a_cursor_decodes_to_its_place() -> None:
    assert decode_cursor(encode_cursor(PLACE), PLACES) == PLACE
    assert decode_cursor(None, PLACES) is None


@pytest.mark.parametrize("text", ["", "x", "é", "bnVsbA", "WzEsMl0", NO_ZONE, NO_ID])
def test_an_invalid_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_cursor(text, PLACES)


@pytest.mark.parametrize("place", [[-1, 0], [1 << 31, 0], [0, 1 << 64]])
def test_a_cursor_beyond_database_integers_is_refused(place: list[int]) -> None:
    text = encode_cursor((datetime(2026, 1, 2, tzinfo=UTC), *place))
    with pytest.raises(InvalidRequest):
        decode_cursor(text, jobs.ATTEMPT_PLACES)


@pytest.mark.parametrize(
    ("known", "status"),
    [
        (None, 200),
        ("", 200),
        ('"u.2"', 200),
        ("u.1", 200),
        (TAG, 304),
        (f"W/{TAG}", 304),
        (f'"a,b" ,{TAG}', 304),
        ("*", 304),
    ],
)
def test_a_known_tag_is_answered_without_a_body(known: str | None, status: int) -> None:
    response = reply_tagged(job_tag(JOB), known, lambda: job_view(JOB), {"X-Total-Count": "1"})
    assert (response.status_code, bool(response.body)) == (status, status == 200)
    assert (response.headers["etag"], response.headers["x-total-count"]) == (TAG, "1")
    assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("wanted", "version"),
    [(TAG, JOB.row_version), (f'"other", {TAG}', JOB.row_version), (None, None), ("*", None)],
)
def test_a_change_requires_the_version_in_if_match(wanted: str | None, version: object) -> None:
    assert required_version(JOB, wanted) == version


@pytest.mark.parametrize("wanted", ["", f"W/{TAG}", '"u.2"', "nonsense"])
def test_a_change_of_another_version_is_refused(wanted: str) -> None:
    with pytest.raises(JobChanged):
        required_version(JOB, wanted)


def test_another_job_of_the_same_id_has_another_tag() -> None:
    assert job_tag(replace(JOB, uid="v")) != job_tag(JOB) != job_tag(replace(JOB, version=2))
