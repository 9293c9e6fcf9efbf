"""Every process that a job's ranks have had, and how it ended."""

from dataclasses import asdict
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Final, TypeAlias

from fastapi import APIRouter, Query, Request, Response
from msgspec import Meta
from msgspec.json import Decoder

from api.access import READ
from api.desk import Desk
from api.incarnation_schemas import IncarnationList, IncarnationView
from api.paging import DEFAULT_LIMIT, decode_cursor, next_page
from api.queries import KnownJobId
from api.responses import refusals
from store.incarnations import Place

_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""What every database takes for a number of a rank or an incarnation."""

PLACES: Final[Decoder[Place]] = Decoder(tuple[datetime, _Count, _Count])

router = APIRouter(tags=["jobs"])


@router.get(
    "/jobs/{job_id}/incarnations",
    summary="Every process of a job, the newest first",
    dependencies=[READ],
    responses=refusals(HTTPStatus.NOT_FOUND),
)
def list_incarnations(
    *,
    job_id: KnownJobId,
    desk: Desk,
    request: Request,
    response: Response,
    limit: Annotated[
        int, Query(ge=1, le=DEFAULT_LIMIT, description="Most processes of one answer.")
    ] = DEFAULT_LIMIT,
    cursor: Annotated[
        str | None, Query(description="From the Link header of the page before.")
    ] = None,
) -> IncarnationList:
    """Say of each process of each rank when it began, how it ended, and what followed from that."""
    desk.jobs.get(job_id)
    # One more than asked for says whether there is a page after this one.
    found = desk.incarnations.page(job_id, limit + 1, decode_cursor(cursor, PLACES))
    response.headers["X-Total-Count"] = str(desk.incarnations.count(job_id))
    if len(found) > limit:
        last = found[limit - 1]
        place = (last.started_at, last.rank, last.incarnation)
        response.headers["Link"] = next_page(request, [], limit, place)
    views = [IncarnationView(**asdict(incarnation)) for incarnation in found[:limit]]
    return IncarnationList(job_id=job_id, incarnations=views)
