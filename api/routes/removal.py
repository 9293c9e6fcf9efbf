"""Deleting one job, or all that match."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query

from api.access import SUBMIT, AskingAgain
from api.desk import Desk, Principal
from api.queries import KnownJobId, statuses_of
from api.removal import Removal, Removed, delete, delete_all, would_delete
from api.responses import refusals
from api.schemas import Deleted, NotDeleted, Purged
from muster.contracts.job import JobStatus
from store.records import Job

YEARS_LIMIT = 1000

router = APIRouter(tags=["jobs"])

DeleteLogs = Annotated[bool, Query(description="Delete the logs too.")]
Force = Annotated[bool, Query(description="Kill what runs, and delete the checkpoints too.")]


async def _asked_removal(
    principal: Principal,
    ask_again: AskingAgain,
    delete_logs: DeleteLogs = True,  # noqa: FBT002  a query parameter
    force: Force = False,  # noqa: FBT002
) -> Removal:
    return Removal(
        delete_logs=delete_logs,
        stop_first=False,
        force=force,
        actor=principal,
        ask_again=ask_again,
    )


AskedRemoval = Annotated[Removal, Depends(_asked_removal)]
"""All but whether jobs are stopped first, which each route calls by a name of its own."""


@router.delete(
    "/jobs/{job_id}",
    summary="Delete a job that is over",
    responses=refusals(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    dependencies=[SUBMIT],
)
async def delete_job(
    job_id: KnownJobId,
    desk: Desk,
    removal: AskedRemoval,
    stop_first: Annotated[bool, Query(description="Stop it gracefully first.")] = False,  # noqa: FBT002
) -> Deleted:
    """Delete rows and logs; with `stop_first` or `force` also of a job that is not over."""
    return await delete(desk, job_id, replace(removal, stop_first=stop_first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Which jobs a purge is about."""

    statuses: Sequence[JobStatus]
    older_than: timedelta | None


async def _asked_match(
    older_than_hours: Annotated[float | None, Query(ge=0, le=YEARS_LIMIT * 8766)] = None,
    older_than_days: Annotated[
        float | None, Query(ge=0, le=YEARS_LIMIT * 366, description="Wins over hours.")
    ] = None,
    statuses: Annotated[list[str], Query(description="Only these; may be repeated.")] = [],  # noqa: B006
) -> Match:
    age = _age(older_than_hours, older_than_days)
    return Match(statuses=statuses_of(statuses, "statuses"), older_than=age)


@router.post("/jobs/purge", summary="Delete the jobs that match", dependencies=[SUBMIT])
async def purge_jobs(
    *,
    desk: Desk,
    match: Annotated[Match, Depends(_asked_match)],
    removal: AskedRemoval,
    stop_running: Annotated[bool, Query(description="Stop gracefully what runs.")] = False,
    dry_run: Annotated[bool, Query(description="Only say what would be deleted.")] = False,
) -> Purged:
    """Delete every job that matches; without a filter all do. What runs is skipped unless asked."""
    cutoff = None if match.older_than is None else desk.clock() - match.older_than
    jobs = await run_sync(desk.jobs.finished_before, cutoff, match.statuses)
    removal = replace(removal, stop_first=stop_running)
    if dry_run:
        foreseen = await run_sync(would_delete, desk, jobs, removal)
        return _purged(jobs, foreseen, dry_run=True)
    return _purged(jobs, await delete_all(desk, jobs, removal), dry_run=False)


def _purged(
    jobs: Sequence[Job], settled: Sequence[Removed | NotDeleted], *, dry_run: bool
) -> Purged:
    removed = [one for one in settled if isinstance(one, Removed)]
    failed = [one for one in settled if isinstance(one, NotDeleted)]
    gone = [one.view.job_id for one in removed]
    known = {*gone, *(one.job_id for one in failed)}
    return Purged(
        matched=len(jobs),
        deleted=0 if dry_run else len(gone),
        job_ids=gone,
        skipped=[job.job_id for job in jobs if job.job_id not in known],
        failed=failed,
        freed_bytes=sum(one.freed_bytes for one in removed),
    )


def _age(hours: float | None, days: float | None) -> timedelta | None:
    if days is not None:
        return timedelta(days=days)
    return None if hours is None else timedelta(hours=hours)
