"""Delete one job, or all jobs that match."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Final

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Response

from api.deletion import DeletedJob, Deletion, delete, delete_all, would_delete
from api.dependencies import SUBMIT, CallerName, Reauthentication, State
from api.parameters import KnownJobId, statuses_of
from api.schema import refusals, reply, returns
from database.records import Job
from muster.contracts.views import Deleted, NotDeleted, Purged

YEARS_LIMIT: Final = 1000

router = APIRouter(tags=["jobs"])


async def _deletion(
    principal: CallerName,
    ask_again: Reauthentication,
    delete_logs: Annotated[bool, Query(description="Delete the logs too.")] = True,  # noqa: FBT002  a query parameter
    force: Annotated[  # noqa: FBT002
        bool, Query(description="Kill what runs, and delete the checkpoints too.")
    ] = False,
) -> Deletion:
    return Deletion(
        delete_logs=delete_logs,
        stop_first=False,
        force=force,
        actor=principal,
        ask_again=ask_again,
    )


RequestedDeletion = Annotated[Deletion, Depends(_deletion)]
"""Without `stop_first`, for which each route has its own parameter."""


@router.delete(
    "/jobs/{job_id}",
    summary="Delete a job that is over",
    responses=returns(Deleted) | refusals(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    dependencies=[SUBMIT],
)
async def delete_job(
    job_id: KnownJobId,
    desk: State,
    deletion: RequestedDeletion,
    stop_first: Annotated[bool, Query(description="Stop it gracefully first.")] = False,  # noqa: FBT002
) -> Response:
    """Delete rows and logs; with `stop_first` or `force` also of a job that is not over."""
    return reply(await delete(desk, job_id, replace(deletion, stop_first=stop_first)))


@router.post(
    "/jobs/purge",
    summary="Delete the jobs that match",
    responses=returns(Purged),
    dependencies=[SUBMIT],
)
async def purge_jobs(
    *,
    desk: State,
    deletion: RequestedDeletion,
    older_than_hours: Annotated[float | None, Query(ge=0, le=YEARS_LIMIT * 8766)] = None,
    older_than_days: Annotated[
        float | None, Query(ge=0, le=YEARS_LIMIT * 366, description="Wins over hours.")
    ] = None,
    statuses: Annotated[list[str], Query(description="Only these; may be repeated.")] = [],  # noqa: B006
    stop_running: Annotated[bool, Query(description="Stop gracefully what runs.")] = False,
    dry_run: Annotated[bool, Query(description="Only say what would be deleted.")] = False,
) -> Response:
    """Delete every matching job; without a filter all match. Running jobs are skipped."""
    cutoff = None
    if older_than_days is not None:
        cutoff = desk.clock() - timedelta(days=older_than_days)
    elif older_than_hours is not None:
        cutoff = desk.clock() - timedelta(hours=older_than_hours)
    wanted = statuses_of(statuses, "statuses")
    jobs = await run_sync(desk.jobs.finished_before, cutoff, wanted)
    deletion = replace(deletion, stop_first=stop_running)
    if dry_run:
        foreseen = await run_sync(would_delete, desk, jobs, deletion)
        return reply(_purged(jobs, foreseen, dry_run=True))
    return reply(_purged(jobs, await delete_all(desk, jobs, deletion), dry_run=False))


def _purged(
    jobs: Sequence[Job], outcomes: Sequence[DeletedJob | NotDeleted], *, dry_run: bool
) -> Purged:
    deleted = [one for one in outcomes if isinstance(one, DeletedJob)]
    failed = [one for one in outcomes if isinstance(one, NotDeleted)]
    job_ids = [one.view.job_id for one in deleted]
    known = {*job_ids, *(one.job_id for one in failed)}
    return Purged(
        matched=len(jobs),
        deleted=0 if dry_run else len(job_ids),
        job_ids=job_ids,
        skipped=[job.job_id for job in jobs if job.job_id not in known],
        failed=failed,
        freed_bytes=sum(one.freed_bytes for one in deleted),
    )
