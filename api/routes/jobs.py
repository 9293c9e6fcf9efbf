"""Jobs: submit, look, stop."""

import hashlib
from http import HTTPStatus
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Query, Request, Response

from api.access import READ, SUBMIT
from api.desk import Desk, FrontDesk, Principal
from api.paging import AskedPage, Page, link_next
from api.problems import Conflict
from api.queries import KnownJobId
from api.requests import JobRequest, StopBody
from api.schemas import (
    EventList,
    JobList,
    JobView,
    SummaryList,
    SummaryView,
)
from api.submission import Submission
from api.summary import summary
from api.views import event_view, job_view
from muster.contracts.job import JobId, JobUid, StopRequest
from store.errors import JobExists
from store.idempotency import IdempotencyKey
from store.records import Job

KEY_LIMIT = 255
"""Longest Idempotency-Key: what the clients that send one are used to."""

EVENTS_LIMIT = 1000

router = APIRouter(tags=["jobs"])


@router.post("/jobs", status_code=HTTPStatus.CREATED, summary="Create a job", dependencies=[SUBMIT])
def create_job(
    *,
    asked: JobRequest,
    desk: Desk,
    principal: Principal,
    request: Request,
    response: Response,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=KEY_LIMIT)] = None,
) -> JobView:
    """Store a job, durable before the answer.

    With an `Idempotency-Key` a repetition answers as the first time and creates nothing.
    """
    key = _key(principal, idempotency_key, asked)
    job = desk.answers.find(key) if key else None
    replayed = job is not None
    if job is None:
        submission = _prepared(asked, desk)
        uid = JobUid(desk.submitter.random_hex())
        job = desk.jobs.create(
            submission.job_id,
            uid,
            submission.spec,
            message=submission.message,
            idempotency=key,
            actor=principal,
        )
        replayed = job.uid != uid
        desk.nudge()
    if replayed:
        response.headers["Idempotency-Replayed"] = "true"
    response.headers["Location"] = f"{request.url.path}/{job.job_id}"
    return job_view(job)


def _prepared(asked: JobRequest, desk: FrontDesk) -> Submission:
    try:
        return desk.submitter.prepare(asked)
    except Conflict:
        # What is left over is that job's, and to go on from it under its own id is no way out.
        if asked.job_id is not None and desk.jobs.find(JobId(asked.job_id)) is not None:
            raise JobExists(JobId(asked.job_id)) from None
        raise


@router.get("/jobs", summary="List jobs, newest first", dependencies=[READ])
def list_jobs(desk: Desk, page: AskedPage, request: Request, response: Response) -> JobList:
    jobs = _jobs_of(page, desk, request, response)
    return JobList(jobs=[job_view(job) for job in jobs])


# Before /jobs/{job_id}, which would take "summaries" for an id.
@router.get("/jobs/summaries", summary="Summaries of jobs, newest first", dependencies=[READ])
def list_summaries(
    desk: Desk, page: AskedPage, request: Request, response: Response
) -> SummaryList:
    jobs = _jobs_of(page, desk, request, response)
    workers = desk.workers.of_jobs([job.job_id for job in jobs])
    now = desk.clock()
    return SummaryList(jobs=[summary(job, workers.get(job.job_id, []), now) for job in jobs])


@router.get("/jobs/{job_id}", summary="Status of one job", dependencies=[READ])
def get_job(job_id: KnownJobId, desk: Desk) -> JobView:
    return job_view(desk.jobs.get(job_id))


@router.get(
    "/jobs/{job_id}/summary", summary="Progress of one job and all its workers", dependencies=[READ]
)
def get_summary(job_id: KnownJobId, desk: Desk) -> SummaryView:
    return summary(desk.jobs.get(job_id), desk.workers.of_job(job_id), desk.clock())


@router.get(
    "/jobs/{job_id}/events", summary="What happened to a job, oldest first", dependencies=[READ]
)
def list_events(
    job_id: KnownJobId,
    desk: Desk,
    limit: Annotated[int, Query(ge=1, le=EVENTS_LIMIT)] = EVENTS_LIMIT,
) -> EventList:
    desk.jobs.get(job_id)
    events = desk.events.of_job(job_id, limit)
    return EventList(job_id=job_id, events=[event_view(event) for event in events])


@router.post("/jobs/{job_id}/stop", summary="Stop a job gracefully", dependencies=[SUBMIT])
def stop_job(
    job_id: KnownJobId, desk: Desk, principal: Principal, asked: StopBody | None = None
) -> JobView:
    """Ask for a last checkpoint and an end. A job that is over answers as it is."""
    grace_seconds = asked.grace_seconds if asked else None
    return job_view(desk.request_stop(job_id, StopRequest.GRACEFUL, grace_seconds, actor=principal))


def _jobs_of(page: Page, desk: FrontDesk, request: Request, response: Response) -> list[Job]:
    # One more than asked for says whether there is a page after this one.
    jobs = desk.jobs.page(page.statuses, page.limit + 1, page.after)
    response.headers["X-Total-Count"] = str(desk.jobs.count(page.statuses))
    if len(jobs) > page.limit:
        response.headers["Link"] = link_next(request.url.path, page, jobs[page.limit - 1])
    return jobs[: page.limit]


def _key(principal: str, key: str | None, asked: JobRequest) -> IdempotencyKey | None:
    if key is None:
        return None
    said = asked.model_dump(mode="json", exclude_unset=True)
    digest = hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()
    return IdempotencyKey(principal=principal, key=key, request_sha256=digest)
