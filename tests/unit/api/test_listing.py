"""Cursors of pages, and entity tags in every form that HTTP allows."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from api.listing import (
    PLACES,
    decode_cursor,
    encode_cursor,
    required_version,
)
from api.views import job_tag
from muster.contracts.job import JobId
from tests.unit.api.jobs import JOB

PLACE = (datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), JobId("a"))
TAG = '"u.1"'


def test_a_cursor_decodes_to_its_place() -> None:
    assert decode_cursor(encode_cursor(PLACE), PLACES) == PLACE
    assert decode_cursor(None, PLACES) is None


@pytest.mark.parametrize(
    ("wanted", "version"),
    [(TAG, JOB.row_version), (f'"other", {TAG}', JOB.row_version), (None, None), ("*", None)],
)
def test_a_change_requires_the_version_in_if_match(wanted: str | None, version: object) -> None:
    assert required_version(JOB, wanted) == version


def test_another_job_of_the_same_id_has_another_tag() -> None:
    assert job_tag(replace(JOB, uid="v")) != job_tag(JOB) != job_tag(replace(JOB, version=2))
