"""Answers that a client may have already: a tag goes out with each, and comes with a question.

A job's own tag is strong: its row's version, so that a change can be asked for on the condition
that nobody was faster. The others are weak: they say that what an answer was made from is the same.
"""

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
import xxhash
from fastapi import Header, Request, Response

from api.problems import Problem
from store.records import Job, RowVersion

IfNoneMatch = Annotated[
    str | None,
    Header(description="The ETag of an earlier answer: 304, and no body, while it still holds."),
]
IfMatch = Annotated[
    str | None,
    Header(description="The ETag of the job as you know it: 412 if it has changed since."),
]

_TAG: Final = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')


class Changed(Problem):
    """The job is not any more what the client has seen of it."""

    def __init__(self) -> None:
        super().__init__(
            HTTPStatus.PRECONDITION_FAILED,
            "job-changed",
            "The job has changed since you looked: GET it again, and repeat with its new ETag.",
        )


def job_tag(job: Job) -> str:
    """Return the strong tag of a job as it is now."""
    return f'"{job.uid}.{job.version}"'


def weak_tag(request: Request, *parts: Any) -> str:  # noqa: ANN401  whatever msgspec can encode
    """Return the tag of what an answer to `request` is made from."""
    asked = request.scope["path"], request.query_params.multi_items()
    said = msgspec.json.encode([asked, *parts])
    return f'W/"{xxhash.xxh3_128_hexdigest(said)}"'


def tagged(response: Response, tag: str, known: str | None) -> Response | None:
    """Give `response` its tag; return what to answer instead if the client knows it already."""
    response.headers["ETag"] = tag
    # To be asked for again each time: a cache must not answer in our place.
    response.headers["Cache-Control"] = "no-cache"
    if known is None or not _is_among(tag, known):
        return None
    return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=response.headers)


def matched(job: Job, wanted: str | None) -> RowVersion | None:
    """Return the version to which the client binds its change; None: to none.

    Raises `Changed` unless `job` is what the client has seen.
    """
    if wanted is None or wanted.strip() == "*":
        return None
    if job_tag(job) not in (tag for is_weak, tag in _tags(wanted) if not is_weak):
        raise Changed
    return job.row_version


def _is_among(tag: str, known: str) -> bool:
    value = tag.removeprefix("W/")
    return known.strip() == "*" or value in (other for _, other in _tags(known))


def _tags(header: str) -> Iterator[tuple[bool, str]]:
    for found in _TAG.finditer(header):
        yield found[1] is not None, f'"{found[2]}"'
