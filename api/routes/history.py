"""The history of a job: its events, the attempts of its ranks, the audit of its reading."""

from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Final, TypeAlias

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec import Meta
from msgspec.json import Decoder

from api.dependencies import READ, State
from api.listing import DEFAULT_LIMIT, Cursor, PageLimit, decode_cursor, link_next
from api.parameters import KnownJobId
from api.schema import refusals, reply, returns
from api.views import audit_view
from database.workers import AttemptPosition
from muster.contracts.views import (
    AuditView,
    EventList,
    EventView,
    IncarnationList,
    IncarnationView,
)

LIMIT: Final = 1000
NUMBER_LIMIT: Final = 2**63 - 1
"""The largest integer of the databases."""

_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
PLACES: Final[Decoder[AttemptPosition]] = Decoder(tuple[datetime, _Count, _Count])

router = APIRouter(tags=["jobs"])


@router.get(
    "/jobs/{job_id}/events",
    summary="Events of a job, oldest first",
    responses=returns(EventList) | refusals(HTTPStatus.NOT_FOUND),
    dependencies=[READ],
)
def list_events(
    job_id: KnownJobId,
    desk: State,
    limit: Annotated[int, Query(ge=1, le=LIMIT)] = LIMIT,
    after: Annotated[int | None, Query(ge=0, le=NUMBER_LIMIT)] = None,
) -> Response:
    """Return the last events, or the first ones after the `event_id` `after`."""
    desk.jobs.get(job_id)
    if after is None:
        events = desk.events.of_job(job_id, limit)
    else:
        events = desk.events.following(job_id, after, limit)
    views = msgspec.convert(events, list[EventView], from_attributes=True)
    return reply(EventList(job_id=job_id, events=views))


@router.get(
    "/jobs/{job_id}/incarnations",
    summary="Every process of a job, the newest first",
    responses=returns(IncarnationList) | refusals(HTTPStatus.NOT_FOUND),
    dependencies=[READ],
)
def list_incarnations(
    job_id: KnownJobId,
    desk: State,
    request: Request,
    limit: PageLimit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """Return for each attempt of each rank when it began, how it ended, and what followed."""
    desk.jobs.get(job_id)
    # One more than requested shows whether there is a next page.
    found = desk.incarnations.page(job_id, limit + 1, decode_cursor(cursor, PLACES))
    headers = {"X-Total-Count": str(desk.incarnations.count(job_id))}
    if len(found) > limit:
        last = found[limit - 1]
        place = (last.started_at, last.rank, last.incarnation)
        headers["Link"] = link_next(request, [], limit, place)
    attempts = msgspec.convert(found[:limit], list[IncarnationView], from_attributes=True)
    return reply(IncarnationList(job_id=job_id, incarnations=attempts), headers=headers)


@router.get(
    "/jobs/{job_id}/audit",
    summary="Whether every sample was read exactly once",
    responses=returns(AuditView) | refusals(HTTPStatus.NOT_FOUND),
    dependencies=[READ],
)
def get_audit(
    job_id: KnownJobId,
    desk: State,
    limit: Annotated[
        int, Query(ge=1, le=LIMIT, description="Most epochs and most checkpoints shown.")
    ] = LIMIT,
) -> Response:
    """Compare the committed samples with the data set.

    The result covers every epoch, including those that are not listed.
    """
    job = desk.jobs.get(job_id)
    return reply(audit_view(job, desk.commits.audit(job_id, limit)))
