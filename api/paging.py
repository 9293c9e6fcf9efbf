"""Pages of a list: an opaque cursor in, a Link header out. Keyset, so that no page skips a job."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from urllib.parse import urlencode

import msgspec
from fastapi import Depends, Query

from api.problems import InvalidRequest, invalid_field
from api.queries import statuses_of
from muster.contracts.job import JobId, JobStatus
from store.records import Job

DEFAULT_LIMIT = 1000
"""High, so that small clients never page."""

Place = tuple[datetime, JobId]
"""Where a page ends: the last job's time of creation and id."""


def encode_cursor(place: Place) -> str:
    """Return `place` as an opaque word."""
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def decode_cursor(text: str | None) -> Place | None:
    """Return where the page before ended; raise `InvalidRequest` for what is no cursor."""
    if text is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        moment, job_id = msgspec.json.decode(raw, type=tuple[datetime, str])
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise _no_cursor() from None
    if moment.tzinfo is None:
        raise _no_cursor()
    return moment, JobId(job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a list was asked for."""

    statuses: Sequence[JobStatus]
    limit: int
    after: Place | None


async def _asked_page(
    status: Annotated[
        list[str], Query(description="Only jobs with one of these statuses; may be repeated.")
    ] = [],  # noqa: B006  FastAPI copies it
    limit: Annotated[
        int, Query(ge=1, le=DEFAULT_LIMIT, description="Most jobs of one answer.")
    ] = DEFAULT_LIMIT,
    cursor: Annotated[
        str | None, Query(description="From the Link header of the page before.")
    ] = None,
) -> Page:
    return Page(statuses=statuses_of(status, "status"), limit=limit, after=decode_cursor(cursor))


AskedPage = Annotated[Page, Depends(_asked_page)]


def link_next(path: str, page: Page, last: Job) -> str:
    """Return the Link header that leads to the page after `last`."""
    every = set(page.statuses) == set(JobStatus)
    query = [] if every else [("status", status.value) for status in page.statuses]
    query += [("limit", str(page.limit)), ("cursor", encode_cursor((last.created_at, last.job_id)))]
    return f'<{path}?{urlencode(query)}>; rel="next"'


def _no_cursor() -> InvalidRequest:
    return invalid_field(
        "query", "cursor", "is no cursor of ours: follow the Link header, or leave it out"
    )
