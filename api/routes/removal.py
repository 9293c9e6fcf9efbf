"""Deleting one job, or all that match."""

from datetime import timedelta
from http import HTTPStatus
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query

from api.access import SUBMIT
from api.desk import Desk, Principal
from api.queries import KnownJobId, statuses_of
from api.removal import Removal, delete, delete_all
from api.responses import refusals
from api.schemas import Deleted, Purged

YEARS_LIMIT = 1000

router = APIRouter(tags=["jobs"])

DeleteLogs = Annotated[bool, Query(description="Delete the logs too.")]
Force = Annotated[bool, Query(description="Kill what runs, and delete the checkpoints too.")]


@router.delete(
    "/jobs/{job_id}",
    summary="Delete a job that is over",
    responses=refusals(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    dependencies=[SUBMIT],
)
async def delete_job(
    job_id: KnownJobId,
    desk: Desk,
    principal: Principal,
    delete_logs: DeleteLogs = True,  # noqa: FBT002  a query parameter
    stop_first: Annotated[bool, Query(description="Stop it gracefully first.")] = False,  # noqa: FBT002
    force: Force = False,  # noqa: FBT002
) -> Deleted:
    """Delete rows and logs; with `stop_first` or `force` also of a job that is not over."""
    removal = Removal(delete_logs=delete_logs, stop_first=stop_first, force=force, actor=principal)
    return await delete(desk, job_id, removal)


@router.post("/jobs/purge", summary="Delete the jobs that match", dependencies=[SUBMIT])
async def purge_jobs(  # noqa: PLR0913  as many as the query has
    *,
    desk: Desk,
    principal: Principal,
    older_than_hours: Annotated[float | None, Query(ge=0, le=YEARS_LIMIT * 8766)] = None,
    older_than_days: Annotated[
        float | None, Query(ge=0, le=YEARS_LIMIT * 366, description="Wins over hours.")
    ] = None,
    statuses: Annotated[list[str], Query(description="Only these; may be repeated.")] = [],  # noqa: B006
    delete_logs: DeleteLogs = True,
    stop_running: Annotated[bool, Query(description="Stop gracefully what runs.")] = False,
    force: Force = False,
) -> Purged:
    """Delete every job that matches; without a filter all do. What runs is skipped unless asked."""
    wanted = statuses_of(statuses, "statuses")
    age = _age(older_than_hours, older_than_days)
    cutoff = None if age is None else desk.clock() - age
    jobs = await run_sync(desk.jobs.finished_before, cutoff, wanted)
    removal = Removal(
        delete_logs=delete_logs, stop_first=stop_running, force=force, actor=principal
    )
    deleted = await delete_all(desk, jobs, removal)
    gone = set(deleted)
    return Purged(
        matched=len(jobs),
        deleted=len(deleted),
        job_ids=list(deleted),
        skipped=[job.job_id for job in jobs if job.job_id not in gone],
    )


def _age(hours: float | None, days: float | None) -> timedelta | None:
    if days is not None:
        return timedelta(days=days)
    return None if hours is None else timedelta(hours=hours)
