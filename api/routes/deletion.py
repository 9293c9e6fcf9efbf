"""Delete one job, or all jobs that match: request their end, wait for it, remove files, then rows.

Files go before rows, so an interrupted delete can be repeated. A concurrent delete may finish first
and free the id for a new job. So while checkpoints are removed, and while logs are moved to a name
of their own, a transaction holds the row of the old job.
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Annotated, Final

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Response

from api.dependencies import SUBMIT, AppState, CurrentCaller, Reauthentication, State
from api.errors import Conflict, Problem
from api.listing import statuses_of
from api.schema import KnownJobId, operation, reply
from api.watch import Found
from database.errors import JobMissing
from database.records import Job
from muster.checkpoints.deletion import BATCH, entries, remove
from muster.checkpoints.errors import CheckpointError
from muster.checkpoints.manifest import Owner
from muster.contracts.job.status import JobId, JobStatus, StopRequest
from muster.contracts.location import Location, parse_location
from muster.contracts.settings.paths import checkpoints_of_job
from muster.contracts.views.job import Deleted, NotDeleted, Purged
from muster.objects.errors import ObjectStoreError
from muster.runtime.archive import archive_files, archived_files

YEARS_LIMIT: Final = 1000

MARGIN_SECONDS: Final = 10.0
"""Time for the coordinator, beyond the grace period of the ranks."""

UNUSABLE: Final = (OSError, CheckpointError, ObjectStoreError)
"""The place of checkpoints is gone or cannot be used."""

_FORCE: Final = "Kill what runs, and delete the checkpoints too; `muster rm --force` keeps them."

router = APIRouter(tags=["jobs"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What a request deletes of a job, and who asks for it."""

    caller: CurrentCaller
    reauthenticate: Reauthentication
    """Called before anything is removed: the caller's token may have been revoked meanwhile."""
    delete_logs: Annotated[bool, Query(description="Delete the logs too.")] = True
    force: Annotated[bool, Query(description=_FORCE)] = False
    delete_checkpoints: Annotated[
        bool | None, Query(description="Delete the checkpoints too. Default: as `force`.")
    ] = None

    def stop_request(self, *, stop_first: bool) -> StopRequest | None:
        """Return how a job that is not over is ended; None: it is not."""
        if self.force:
            return StopRequest.FORCED
        return StopRequest.GRACEFUL if stop_first else None


RequestedDeletion = Annotated[Deletion, Depends()]


@router.delete(
    "/jobs/{job_id}", **operation("Delete a job that is over", SUBMIT, Deleted, 404, 409)
)
async def delete_job(
    job_id: KnownJobId,
    state: State,
    deletion: RequestedDeletion,
    stop_first: Annotated[bool, Query(description="Stop it gracefully first.")] = False,  # noqa: FBT002
) -> Response:
    """Delete rows and logs; with `stop_first` or `force` also of a job that is not over."""
    stop_request = deletion.stop_request(stop_first=stop_first)
    return reply(await delete(state, job_id, deletion, stop_request))


@router.post("/jobs/purge", **operation("Delete the jobs that match", SUBMIT, Purged))
async def purge_jobs(
    *,
    state: State,
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
        cutoff = state.clock() - timedelta(days=older_than_days)
    elif older_than_hours is not None:
        cutoff = state.clock() - timedelta(hours=older_than_hours)
    wanted = statuses_of(statuses, "statuses")
    jobs = await run_sync(state.jobs.finished_before, cutoff, wanted)
    stop_request = deletion.stop_request(stop_first=stop_running)
    failed: list[NotDeleted] = []
    if dry_run:
        may_be_deleted = (job for job in jobs if job.is_terminal or stop_request)
        freed_bytes = {
            job.job_id: await run_sync(_size_bytes, state, job, deletion) for job in may_be_deleted
        }
    else:
        freed_bytes, failed = await delete_all(state, jobs, deletion, stop_request)
    known = {*freed_bytes, *(one.job_id for one in failed)}
    return reply(
        Purged(
            matched=len(jobs),
            deleted=0 if dry_run else len(freed_bytes),
            job_ids=list(freed_bytes),
            skipped=[job.job_id for job in jobs if job.job_id not in known],
            failed=failed,
            freed_bytes=sum(freed_bytes.values()),
        )
    )


async def delete(
    state: AppState, job_id: JobId, deletion: Deletion, stop_request: StopRequest | None
) -> Deleted:
    """Delete one job, after its end if `stop_request` says how.

    Raises `Conflict` if it is not over and may not be stopped, or does not end in time, and
    `Problem` if the caller lost access meanwhile.
    """
    job = await run_sync(state.jobs.get, job_id)
    if not job.is_terminal:
        if stop_request is None:
            raise Conflict(
                "job-not-over",
                f"{job_id} is {job.status_shown}: stop it first (POST /jobs/{job_id}/stop), or "
                "repeat with ?stop_first=true (a last checkpoint) or ?force=true (at once).",
            )
        absence = await run_sync(state.coordinator.absence)
        if not _can_be_ended(job, absence):
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "no-coordinator",
                f"{job_id} cannot be ended now: {absence}, then repeat this request.",
            )
        await _end_all(state, [job], stop_request, deletion.caller.name)
        uid, job = job.uid, await run_sync(state.jobs.get, job_id)
        if job.uid != uid:
            raise JobMissing(job_id)
        if not job.is_terminal:
            raise Conflict(
                "job-still-stopping", f"{job_id} is still stopping: repeat this request later."
            )
        await deletion.reauthenticate()
    ranks = await run_sync(state.history.ranks, job_id)
    checkpoints_deleted = await run_sync(_delete, state, job, deletion)
    return Deleted(
        job_id=job_id,
        deleted=True,
        logs_deleted=deletion.delete_logs,
        checkpoints_deleted=checkpoints_deleted,
        checkpoints_left=_checkpoints(job, deletion) is None
        and any(rank.checkpoints_saved for rank in ranks),
    )


async def delete_all(
    state: AppState, jobs: Sequence[Job], deletion: Deletion, stop_request: StopRequest | None
) -> tuple[dict[JobId, int], list[NotDeleted]]:
    """Delete those of `jobs` that are over, or that end in time when requested.

    Returns the size of each deleted job's files, and the jobs that could not be deleted, which do
    not stop the others. Raises `Problem` once the caller loses access.
    """
    if stop_request is not None and not all(job.is_terminal for job in jobs):
        await _end_all(state, jobs, stop_request, deletion.caller.name)
    freed_bytes: dict[JobId, int] = {}
    failed = []
    for job in jobs:
        await deletion.reauthenticate()
        now = await run_sync(state.jobs.find, job.job_id)
        if now is None or now.uid != job.uid or not now.is_terminal:
            continue
        size_bytes = await run_sync(_size_bytes, state, now, deletion)
        try:
            await run_sync(_delete, state, now, deletion)
        except JobMissing:  # a concurrent delete was faster
            continue
        except Conflict as conflict:
            failed.append(NotDeleted(job_id=now.job_id, detail=conflict.detail))
        else:
            freed_bytes[now.job_id] = size_bytes
    return freed_bytes, failed


async def _end_all(state: AppState, jobs: Sequence[Job], request: StopRequest, actor: str) -> None:
    """Request the end of each job that can be ended now, and wait for all of them."""
    absence = await run_sync(state.coordinator.absence)
    ending = [job for job in jobs if not job.is_terminal and _can_be_ended(job, absence)]
    for job in ending:
        with suppress(JobMissing):
            end = partial(state.request_stop, job.job_id, request, None, actor=actor, uid=job.uid)
            await run_sync(end)
    if not ending:
        return
    waiting = frozenset(job.uid for job in ending)

    def read(_after: int) -> Found:
        return Found({}, is_over=not state.jobs.not_over(waiting))

    timeout_seconds = max(_timeout_seconds(job, request) for job in ending)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds), state.watching(waiting, read) as feed:
            await asyncio.shield(feed.polling)


def _can_be_ended(job: Job, absence: str | None) -> bool:
    """Return False for a queued job without a coordinator; that of a running job will be back."""
    return absence is None or job.status is not JobStatus.QUEUED


def _timeout_seconds(job: Job, request: StopRequest) -> float:
    if request is StopRequest.FORCED:
        return MARGIN_SECONDS
    grace = job.stop_grace_seconds
    return MARGIN_SECONDS + (job.spec.stop_grace_seconds if grace is None else grace)


def _delete(state: AppState, job: Job, deletion: Deletion) -> bool:
    """Delete a job that is over, and return whether checkpoints were deleted, too."""
    checkpoints = _checkpoints(job, deletion)
    # Checkpoints first, as they are found by their owner: if they cannot go, the job is unchanged.
    checkpoints_deleted = checkpoints is not None and _remove_checkpoints(state, checkpoints, job)
    files = state.data_dir.job(job.job_id)
    try:
        with state.jobs.keeping(job.job_id, job.uid):
            archive = archive_files(files, job.uid).root
        if deletion.delete_logs:
            while archive.is_dir() and not archive.is_symlink():  # a link that a job left stays
                with suppress(FileNotFoundError):  # a concurrent delete removes parts of it, too
                    shutil.rmtree(archive)
    except OSError as error:
        raise _not_removed(files.root, error) from error
    delete = partial(state.jobs.delete, job.job_id, job.uid, with_files=deletion.delete_logs)
    state.disk_reserve.release_if_full(delete)
    state.disk_reserve.allocate()
    shutil.rmtree(state.data_dir.snapshot(job.uid), ignore_errors=True)
    return checkpoints_deleted


def _size_bytes(state: AppState, job: Job, deletion: Deletion) -> int:
    """Return the size of what `deletion` removes of this job."""
    size = 0
    if (checkpoints := _checkpoints(job, deletion)) is not None:
        with suppress(*UNUSABLE):
            saved = entries(checkpoints, _owner_of_checkpoints(job))
            size = sum(entry.size_bytes for entry in saved)
    if deletion.delete_logs:
        files = state.data_dir.job(job.job_id)
        # The archive is from an interrupted delete.
        for root in (files.root, archived_files(files, job.uid).root):
            for where, _, names in os.walk(root):
                for name in names:
                    with suppress(OSError):  # removed meanwhile
                        found = os.lstat(f"{where}/{name}")
                        # A log whose oldest lines were discarded has a hole.
                        size += min(found.st_size, 512 * found.st_blocks)
    return size


def _checkpoints(job: Job, deletion: Deletion) -> Location | None:
    """Return the place of checkpoints to remove, if any."""
    chosen = deletion.delete_checkpoints
    if not (deletion.force if chosen is None else chosen) or job.spec.checkpoint_dir is None:
        return None
    return checkpoints_of_job(parse_location(job.spec.checkpoint_dir), job.job_id)


def _owner_of_checkpoints(job: Job) -> Owner:
    """Return their owner; a job that resumes under its own id also owns the earlier ones."""
    uid = None if job.spec.earlier and job.spec.earlier.job == job.job_id else job.uid
    return Owner(job_id=job.job_id, job_uid=uid, rank=0, world_size=job.world_size, generation=None)


def _remove_checkpoints(state: AppState, checkpoints: Location, job: Job) -> bool:
    """Remove them, and return whether there were any.

    Raises `JobMissing` once the row is gone, as they may be a later job's then. The row is held for
    one batch at a time: it blocks all other writes, and the disk or store may be slow.
    """
    try:
        found = entries(checkpoints, _owner_of_checkpoints(job))
        for first in range(0, len(found), BATCH):
            with state.jobs.keeping(job.job_id, job.uid):
                remove(found[first : first + BATCH])
    except UNUSABLE as error:
        raise _not_removed(checkpoints, error) from error
    return bool(found)


def _not_removed(directory: Location, why: Exception) -> Conflict:
    return Conflict(
        "files-not-removed",
        f"{directory} could not be removed ({why}): correct that and repeat the request.",
    )
