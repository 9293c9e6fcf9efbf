"""From a request to a job that is durable, or to the plan of one.

Who repeats a request under its key hears what was answered first, whatever has become of the job
since. Who leaves the id to us is never told of another's.
"""

from itertools import count
from typing import Final

from anyio.to_thread import run_sync

from api.desk import FrontDesk
from api.planning import plan
from api.problems import Conflict
from api.requests import JobRequest
from api.schemas import JobPlan
from api.submission import Submission
from muster.contracts.errors import MusterError
from muster.contracts.job import JobId, JobUid
from store.errors import JobExists
from store.idempotency import IdempotencyKey
from store.records import Job

IDS_TRIED: Final = 4
"""Ids made up for one job. Of 500 jobs in a second two are given the same one in one of 17 000
cases (500² / 2 / 36⁶)."""


async def create(
    asked: JobRequest, desk: FrontDesk, uid: JobUid, key: IdempotencyKey | None, actor: str
) -> Job:
    """Return the new job, or the one that `key` has been answered with before.

    Raises what `Submitter.prepare` and `Jobs.create` do.
    """
    tried = count(1)
    while True:
        try:
            return await _created(asked, desk, uid, key, actor)
        except JobExists:
            if asked.job_id is not None or next(tried) == IDS_TRIED:
                raise


def planned(asked: JobRequest, desk: FrontDesk) -> JobPlan:
    """Return what `create` would store, and store nothing. Raises what it does."""
    submission = _prepared(asked, desk)
    if asked.job_id is not None and desk.jobs.find(submission.job_id) is not None:
        raise JobExists(submission.job_id)
    return plan(submission, desk.files.synthetic_dataset)


async def _created(
    asked: JobRequest, desk: FrontDesk, uid: JobUid, key: IdempotencyKey | None, actor: str
) -> Job:
    try:
        submission = await run_sync(_prepared, asked, desk)
    except MusterError:
        # The job that this repeats may be what is in the way now, or what it needed is gone.
        job = await run_sync(desk.answers.find, key) if key else None
        if job is None:
            raise
        return job
    creation = desk.jobs.creation(
        submission.job_id,
        uid,
        submission.spec,
        message=submission.message,
        idempotency=key,
        actor=actor,
    )
    return await desk.intake.take_in(creation)


def _prepared(asked: JobRequest, desk: FrontDesk) -> Submission:
    try:
        return desk.submitter.prepare(asked)
    except Conflict:
        # What is left over is that job's, and to go on from it under its own id is no way out.
        if asked.job_id is not None and desk.jobs.find(JobId(asked.job_id)) is not None:
            raise JobExists(JobId(asked.job_id)) from None
        raise
