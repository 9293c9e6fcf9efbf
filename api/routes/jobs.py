"""Jobs: submit, look, stop."""

import hashlib
from http import HTTPStatus
from typing import Annotated

import msgspec
from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response

from api.access import READ, SUBMIT
from api.conditional import IfNoneMatch, job_tag, tagged, weak_tag
from api.creation import create, planned
from api.desk import Asking, Desk, FrontDesk, Principal
from api.json_bodies import JsonRoute
from api.paging import AskedPage, Page, link_next
from api.queries import KnownJobId
from api.requests import JobRequest, StopBody
from api.responses import UNCHANGED, refusals
from api.schemas import (
    EventList,
    JobList,
    JobPlan,
    JobView,
    SummaryList,
    SummaryView,
)
from api.summary import summary
from api.views import event_view, job_seen_by, job_view
from api.waiting import WAIT_LIMIT_SECONDS, awaited, awaited_statuses
from muster.contracts.job import JobUid, StopRequest
from store.idempotency import IdempotencyKey
from store.records import Job

KEY_LIMIT = 255
"""Longest Idempotency-Key: what the clients that send one are used to."""

EVENTS_LIMIT = 1000
NUMBER_LIMIT = 2**63 - 1
"""The largest number that a database keeps."""

router = APIRouter(tags=["jobs"], route_class=JsonRoute)


@router.post(
    "/jobs",
    status_code=HTTPStatus.CREATED,
    summary="Create a job",
    response_model=JobView,
    responses=refusals(HTTPStatus.CONFLICT)
    | {200: {"model": JobPlan, "description": "What a job would be, in a dry run."}},
    dependencies=[SUBMIT],
)
async def create_job(
    *,
    asked: JobRequest,
    desk: Desk,
    caller: Asking,
    request: Request,
    response: Response,
    dry_run: Annotated[bool, Query(description="Check and plan it; store nothing.")] = False,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=KEY_LIMIT)] = None,
) -> JobView | Response:
    """Store a job, durable before the answer.

    With an `Idempotency-Key` a repetition answers as the first time and creates nothing.
    """
    if dry_run:
        found = await run_sync(planned, asked, desk)
        return Response(found.model_dump_json(), media_type="application/json")
    key = _key(caller.principal, idempotency_key, asked)
    uid = JobUid(desk.submitter.random_hex())
    job = await create(asked, desk, uid, key, caller.name)
    if job.uid != uid:
        response.headers["Idempotency-Replayed"] = "true"
    response.headers["Location"] = f"{request.scope['path']}/{job.job_id}"
    response.headers["ETag"] = job_tag(job)
    return job_view(job)


@router.get(
    "/jobs",
    summary="List jobs, newest first",
    response_model=JobList,
    responses=UNCHANGED,
    dependencies=[READ],
)
def list_jobs(
    *,
    desk: Desk,
    caller: Asking,
    page: AskedPage,
    request: Request,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> JobList | Response:
    """Answer with one page; `X-Total-Count` counts them all, and `Link` leads to the next."""
    jobs = _jobs_of(page, desk, request, response)
    tag = weak_tag(request, response.headers["X-Total-Count"], [job.row_version for job in jobs])
    return tagged(response, tag, if_none_match) or JobList(
        jobs=[job_seen_by(caller, job) for job in jobs]
    )


# Before /jobs/{job_id}, which would take "summaries" for an id.
@router.get(
    "/jobs/summaries",
    summary="Summaries of jobs, newest first",
    response_model=SummaryList,
    responses=UNCHANGED,
    dependencies=[READ],
)
def list_summaries(
    desk: Desk,
    page: AskedPage,
    request: Request,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> SummaryList | Response:
    """Answer with one page, as the list of jobs does. Ages of heartbeats make no tag a new one."""
    jobs = _jobs_of(page, desk, request, response)
    workers = desk.workers.of_jobs([job.job_id for job in jobs])
    made_from = [job.row_version for job in jobs], list(workers.items())
    tag = weak_tag(request, response.headers["X-Total-Count"], made_from)
    known = tagged(response, tag, if_none_match)
    if known is not None:
        return known
    now = desk.clock()
    return SummaryList(jobs=[summary(job, workers.get(job.job_id, []), now) for job in jobs])


@router.get(
    "/jobs/{job_id}",
    summary="Status of one job",
    response_model=JobView,
    responses=refusals(HTTPStatus.NOT_FOUND) | UNCHANGED,
    dependencies=[READ],
)
async def get_job(  # noqa: PLR0913  a question has many parameters
    *,
    job_id: KnownJobId,
    desk: Desk,
    caller: Asking,
    request: Request,
    response: Response,
    wait: Annotated[
        float,
        Query(ge=0, le=WAIT_LIMIT_SECONDS, description="Most seconds to wait for `until`."),
    ] = 0,
    until: Annotated[
        list[str],
        Query(
            description="What to wait for: `terminal`, or statuses; may be repeated. The end of "
            "the job ends every wait."
        ),
    ] = ["terminal"],  # noqa: B006  FastAPI copies it
    if_none_match: IfNoneMatch = None,
) -> JobView | Response:
    """Answer at once, or with `wait` as soon as the job is where you want it.

    After that time it is answered as it is then: look at its status.
    """
    wanted = awaited_statuses(until)
    if wait:
        job = await awaited(desk, request, job_id, wanted, wait)
    else:
        job = await run_sync(desk.jobs.get, job_id)
    return tagged(response, job_tag(job), if_none_match) or job_seen_by(caller, job)


@router.get(
    "/jobs/{job_id}/summary",
    summary="Progress of one job and all its workers",
    response_model=SummaryView,
    responses=refusals(HTTPStatus.NOT_FOUND) | UNCHANGED,
    dependencies=[READ],
)
def get_summary(
    job_id: KnownJobId,
    desk: Desk,
    request: Request,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> SummaryView | Response:
    """Answer with the numbers of this moment. Ages of heartbeats make no tag a new one."""
    job, workers = desk.jobs.get(job_id), desk.workers.of_job(job_id)
    tag = weak_tag(request, job.row_version, workers)
    return tagged(response, tag, if_none_match) or summary(job, workers, desk.clock())


@router.get(
    "/jobs/{job_id}/events",
    summary="What happened to a job, oldest first",
    responses=refusals(HTTPStatus.NOT_FOUND),
    dependencies=[READ],
)
def list_events(
    job_id: KnownJobId,
    desk: Desk,
    limit: Annotated[int, Query(ge=1, le=EVENTS_LIMIT)] = EVENTS_LIMIT,
    after: Annotated[int | None, Query(ge=0, le=NUMBER_LIMIT)] = None,
) -> EventList:
    """Answer with the last events, or with the first ones after that of the `event_id` `after`."""
    desk.jobs.get(job_id)
    if after is None:
        events = desk.events.of_job(job_id, limit)
    else:
        events = desk.events.following(job_id, after, limit)
    return EventList(job_id=job_id, events=[event_view(event) for event in events])


@router.post(
    "/jobs/{job_id}/stop",
    summary="Stop a job gracefully",
    responses=refusals(HTTPStatus.NOT_FOUND),
    dependencies=[SUBMIT],
)
def stop_job(
    job_id: KnownJobId, desk: Desk, principal: Principal, asked: StopBody | None = None
) -> JobView:
    """Ask for a last checkpoint and an end. A job that is over answers as it is."""
    asked = asked or StopBody()
    job = desk.request_stop(
        job_id, StopRequest.GRACEFUL, asked.grace_seconds, actor=principal, why=asked.reason
    )
    return job_view(job)


def _jobs_of(page: Page, desk: FrontDesk, request: Request, response: Response) -> list[Job]:
    # One more than asked for says whether there is a page after this one.
    jobs = desk.jobs.page(page.selection, page.limit + 1, page.after)
    response.headers["X-Total-Count"] = str(desk.jobs.count(page.selection))
    if len(jobs) > page.limit:
        response.headers["Link"] = link_next(request, page, jobs[page.limit - 1])
    return jobs[: page.limit]


def _key(principal: str, key: str | None, asked: JobRequest) -> IdempotencyKey | None:
    if key is None:
        return None
    said = asked.model_dump(mode="json", exclude_unset=True)
    digest = hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()
    return IdempotencyKey(principal=principal, key=key, request_sha256=digest)
