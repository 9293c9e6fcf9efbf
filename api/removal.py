"""Deleting jobs: ask for their end if allowed, wait for it, remove files, then rows.

Files go before rows, so that a delete that was cut short can simply be repeated. Another delete of
the same job may be done while this one still removes, and its id be a new job's: so checkpoints go,
and logs are brought under a name of their own, while the row of the old job is held.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

from anyio.to_thread import run_sync

from api.access import AskAgain
from api.desk import FrontDesk
from api.problems import Conflict, Problem
from api.schemas import Deleted, NotDeleted
from muster.attic import aside_of, set_aside
from muster.checkpoints.owner import Owner
from muster.checkpoints.removal import entries, size_bytes
from muster.contracts.job import JobId, JobStatus, StopRequest
from muster.contracts.layout import checkpoints_of_job
from store.errors import JobMissing
from store.records import Job

POLL_SECONDS: Final = 0.05

ATTEMPTS: Final = 5

MARGIN_SECONDS: Final = 10.0
"""What a coordinator may take beyond the ranks' own grace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What is to happen to jobs that are not over, and to their files, and who asked for it."""

    delete_logs: bool
    stop_first: bool
    force: bool
    actor: str
    ask_again: AskAgain
    """Called before anything goes: until then others may have been waited for."""

    @property
    def request(self) -> StopRequest | None:
        """How a job that is not over is ended; None: it is not."""
        if self.force:
            return StopRequest.FORCED
        return StopRequest.GRACEFUL if self.stop_first else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What has become of one job."""

    view: Deleted
    freed_bytes: int


async def delete(desk: FrontDesk, job_id: JobId, removal: Removal) -> Deleted:
    """Delete one job, and wait for its end first if `removal` asks for one.

    Raises `Conflict` if it is not over and may not be stopped, or does not end in time, and
    `Problem` if who asked may not any more.
    """
    job = await run_sync(desk.jobs.get, job_id)
    if not job.is_terminal:
        if removal.request is None:
            raise Conflict(
                "job-not-over",
                f"{job_id} is {job.status_shown}: stop it first (POST /jobs/{job_id}/stop), or "
                "repeat with ?stop_first=true (a last checkpoint) or ?force=true (at once).",
            )
        # Before anything is asked for: who is told "not now" finds nothing changed.
        absence = await run_sync(desk.coordinator.absence)
        if not _can_be_ended(job, absence):
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "no-coordinator",
                f"{job_id} cannot be ended now: {absence}, then repeat this call.",
            )
        await run_sync(_ask_for_end, desk, job, removal.request, removal.actor)
        job = await _ended(desk, job, removal.request)
        await removal.ask_again()
    return await run_sync(_remove, desk, job, removal)


def would_delete(desk: FrontDesk, jobs: Sequence[Job], removal: Removal) -> list[Removed]:
    """Return what `delete_all` would do if every job ended in time, and do nothing."""
    return [
        _foreseen(desk, job, removal)
        for job in jobs
        if job.is_terminal or removal.request is not None
    ]


async def delete_all(
    desk: FrontDesk, jobs: Sequence[Job], removal: Removal
) -> list[Removed | NotDeleted]:
    """Delete those of `jobs` that are over, or end in time when asked to.

    Returns which, and which of them could not be deleted; one that cannot does not stop the rest.
    Raises `Problem` as soon as who asked may not any more.
    """
    if removal.request is not None and not all(job.is_terminal for job in jobs):
        await _end_all(desk, jobs, removal.request, removal.actor)
    done: list[Removed | NotDeleted] = []
    for job in jobs:
        await removal.ask_again()
        settled = await run_sync(_remove_if_over, desk, job, removal)
        done += [] if settled is None else [settled]
    return done


def _remove_if_over(desk: FrontDesk, job: Job, removal: Removal) -> Removed | NotDeleted | None:
    now = desk.jobs.find(job.job_id)
    if now is None or now.uid != job.uid or not now.is_terminal:
        return None
    try:
        freed_bytes = _foreseen(desk, now, removal).freed_bytes
        return Removed(view=_remove(desk, now, removal), freed_bytes=freed_bytes)
    except JobMissing:  # somebody else deletes it at this moment
        return None
    except Conflict as conflict:
        return NotDeleted(job_id=now.job_id, detail=conflict.detail)


async def _end_all(desk: FrontDesk, jobs: Sequence[Job], request: StopRequest, actor: str) -> None:
    """Ask for the end of those that can be ended now, and wait for it as long as it may take."""
    absence = await run_sync(desk.coordinator.absence)
    asked = [job for job in jobs if not job.is_terminal and _can_be_ended(job, absence)]
    for job in asked:
        with suppress(JobMissing):
            await run_sync(_ask_for_end, desk, job, request, actor)
    patience_seconds = max((_patience_seconds(job, request) for job in asked), default=0.0)
    deadline = asyncio.get_running_loop().time() + patience_seconds
    waiting = {job.uid for job in asked}
    while waiting and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(POLL_SECONDS)
        waiting = await run_sync(desk.jobs.not_over, waiting)


def _can_be_ended(job: Job, absence: str | None) -> bool:
    """Whether somebody will act on a request: where a job runs, who is away will be back."""
    return absence is None or job.status is not JobStatus.QUEUED


def _ask_for_end(desk: FrontDesk, job: Job, request: StopRequest, actor: str) -> None:
    desk.request_stop(job.job_id, request, None, actor=actor, uid=job.uid)


async def _ended(desk: FrontDesk, job: Job, request: StopRequest) -> Job:
    deadline = asyncio.get_running_loop().time() + _patience_seconds(job, request)
    while True:
        now = await run_sync(desk.jobs.get, job.job_id)
        if now.uid != job.uid:
            raise JobMissing(job.job_id)
        if now.is_terminal:
            return now
        if asyncio.get_running_loop().time() > deadline:
            raise Conflict(
                "job-still-stopping", f"{job.job_id} is still stopping: repeat this call later."
            )
        await asyncio.sleep(POLL_SECONDS)


def _patience_seconds(job: Job, request: StopRequest) -> float:
    if request is StopRequest.FORCED:
        return MARGIN_SECONDS
    grace = job.stop_grace_seconds
    return MARGIN_SECONDS + (job.spec.stop_grace_seconds if grace is None else grace)


def _remove(desk: FrontDesk, job: Job, removal: Removal) -> Deleted:
    checkpoints = _checkpoints(job, removal)
    # First, as they go by their owner: if they cannot go, the job is still all there.
    checkpoints_deleted = checkpoints is not None and _remove_checkpoints(desk, checkpoints, job)
    aside = _set_aside(desk, job)
    if removal.delete_logs:
        _remove_tree(aside)
    desk.jobs.delete(job.job_id, job.uid)
    return Deleted(
        job_id=job.job_id,
        deleted=True,
        logs_deleted=removal.delete_logs,
        checkpoints_deleted=checkpoints_deleted,
    )


def _set_aside(desk: FrontDesk, job: Job) -> Path:
    """Bring the job's own files under a name that will never be another job's, and return it."""
    files = desk.files.job(job.job_id)
    try:
        with desk.jobs.keeping(job.job_id, job.uid):
            return set_aside(files, job.uid).root
    except OSError as error:
        raise _not_removed(files.root, error) from error


def _foreseen(desk: FrontDesk, job: Job, removal: Removal) -> Removed:
    checkpoints = _checkpoints(job, removal)
    held = None if checkpoints is None else _size_of_checkpoints(checkpoints, job)
    files = desk.files.job(job.job_id)
    # Those aside are of a delete that was cut short.
    logs = (files.root, aside_of(files, job.uid).root) if removal.delete_logs else ()
    view = Deleted(
        job_id=job.job_id,
        deleted=True,
        logs_deleted=removal.delete_logs,
        checkpoints_deleted=held is not None,
    )
    return Removed(view=view, freed_bytes=(held or 0) + sum(map(_size_bytes, logs)))


def _checkpoints(job: Job, removal: Removal) -> Path | None:
    """Return the directory that goes with the job if `removal` says so."""
    if not removal.force or job.spec.checkpoint_dir is None:
        return None
    return checkpoints_of_job(Path(job.spec.checkpoint_dir), job.job_id)


def _owner_of_checkpoints(job: Job) -> Owner:
    """Return who has saved them; a job that goes on under its own id has taken over the earlier."""
    uid = None if job.spec.resume_from == job.job_id else job.uid
    return Owner(job_id=job.job_id, job_uid=uid, rank=0, world_size=job.world_size, generation=None)


def _size_of_checkpoints(checkpoints: Path, job: Job) -> int | None:
    try:
        return size_bytes(checkpoints, _owner_of_checkpoints(job))
    except OSError:  # gone, or going, or not to be looked into
        return None


def _remove_checkpoints(desk: FrontDesk, checkpoints: Path, job: Job) -> bool:
    """Remove them, and return whether there were any. Raises `JobMissing` once they may be others'.

    What was found is no later job's if this one's row is there still. It is held for one at a time,
    as nobody else writes anything meanwhile, and a disk may be far away.
    """
    found = False
    try:
        for entry in entries(checkpoints, _owner_of_checkpoints(job)):
            found = True
            with desk.jobs.keeping(job.job_id, job.uid):
                entry.remove()
    except OSError as error:
        raise _not_removed(checkpoints, error) from error
    return found


def _is_own_directory(directory: Path) -> bool:
    return directory.is_dir() and not directory.is_symlink()


def _size_bytes(directory: Path) -> int:
    """Return what the files below hold; one that goes away meanwhile counts as nothing."""
    if not _is_own_directory(directory):
        return 0
    size = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                size += os.lstat(f"{where}/{name}").st_size
    return size


def _remove_tree(directory: Path) -> None:
    """Remove a directory that is one: a link is left alone, and none is followed below it."""
    if not _is_own_directory(directory):
        return
    for _ in range(ATTEMPTS):
        try:
            shutil.rmtree(directory)
        except OSError as error:
            # A process that is just ending may add or remove a file under our hands.
            if error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                raise _not_removed(directory, error) from error
        if not directory.exists():
            return
    raise _not_removed(directory, "somebody keeps writing in it")


def _not_removed(directory: Path, why: object) -> Conflict:
    return Conflict(
        "files-not-removed", f"{directory} could not be removed ({why}): mend it and repeat."
    )
