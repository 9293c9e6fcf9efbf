"""What a job has proved of its reading."""

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Query

from api.access import READ
from api.audit import audit_view
from api.desk import Desk
from api.pool_schemas import AuditView
from api.queries import KnownJobId
from api.responses import refusals

LIMIT: Final = 1000

router = APIRouter(tags=["jobs"])


@router.get(
    "/jobs/{job_id}/audit",
    summary="Whether every sample was read exactly once",
    dependencies=[READ],
    responses=refusals(HTTPStatus.NOT_FOUND),
)
def get_audit(
    job_id: KnownJobId,
    desk: Desk,
    limit: Annotated[
        int, Query(ge=1, le=LIMIT, description="Most epochs and most checkpoints shown.")
    ] = LIMIT,
) -> AuditView:
    """Compare what was committed with what is in the data set.

    The verdict is on every epoch, also on those that are not shown; how many those are is said.
    """
    job = desk.jobs.get(job_id)
    return audit_view(job, desk.commits.audit(job_id, limit))
