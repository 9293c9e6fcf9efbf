"""Tags that come back, in every form that HTTP allows."""

from dataclasses import replace

import pytest
from fastapi import Response
from unit.api.jobs import JOB

from api.conditional import Changed, job_tag, matched, tagged

TAG = '"u.1"'


@pytest.mark.parametrize(
    ("known", "is_unchanged"),
    [
        (None, False),
        ("", False),
        ('"u.2"', False),
        ("u.1", False),
        (TAG, True),
        (f"W/{TAG}", True),
        (f'"a,b" ,{TAG}', True),
        ("*", True),
    ],
)
def test_a_tag_is_known_whether_weak_or_strong(known: str | None, *, is_unchanged: bool) -> None:
    response = Response()
    answer = tagged(response, job_tag(JOB), known)
    assert response.headers["etag"] == TAG
    assert (answer is not None) is is_unchanged
    if answer is not None:
        assert (answer.status_code, answer.headers["etag"]) == (304, TAG)


@pytest.mark.parametrize("wanted", [TAG, f'"other", {TAG}'])
def test_a_change_is_bound_to_the_version_that_was_seen(wanted: str) -> None:
    assert matched(JOB, wanted) == JOB.row_version


@pytest.mark.parametrize("wanted", [None, "*"])
def test_a_change_of_any_version_is_bound_to_none(wanted: str | None) -> None:
    assert matched(JOB, wanted) is None


@pytest.mark.parametrize("wanted", ["", f"W/{TAG}", '"u.2"', "nonsense"])
def test_a_change_of_another_version_is_refused(wanted: str) -> None:
    with pytest.raises(Changed):
        matched(JOB, wanted)


def test_another_job_of_the_same_id_has_other_tags() -> None:
    assert job_tag(replace(JOB, uid="v")) != job_tag(JOB) != job_tag(replace(JOB, version=2))
