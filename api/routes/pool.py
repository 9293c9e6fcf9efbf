"""The pool of a job: look at it, scale it, let a worker go, pause."""

from http import HTTPStatus

from fastapi import APIRouter, Response

from api.access import READ, SUBMIT
from api.agent_state import agent_state
from api.conditional import IfMatch, job_tag, matched
from api.desk import Desk, FrontDesk, Principal
from api.elasticity import check_lets_go, check_pausable, check_world_size
from api.json_bodies import JsonRoute
from api.pool import member_list
from api.pool_schemas import MemberList
from api.queries import KnownJobId, KnownWorkerId
from api.requests import JobPatch
from api.responses import refusals
from api.schemas import JobView
from api.views import job_view
from muster.contracts.job import JobId

router = APIRouter(tags=["jobs"], route_class=JsonRoute)


@router.patch(
    "/jobs/{job_id}",
    summary="Scale a job that trains synchronously",
    responses=refusals(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED),
    dependencies=[SUBMIT],
)
def scale_job(
    job_id: KnownJobId,
    desk: Desk,
    principal: Principal,
    asked: JobPatch,
    response: Response,
    if_match: IfMatch = None,
) -> JobView:
    """Ask for another number of ranks: training pauses between two steps, and goes on with them.

    The weights are the same as if the job had always had that number. With `If-Match` nothing
    happens to a job that has changed since you looked.
    """
    seen = desk.jobs.get(job_id)
    only = matched(seen, if_match)
    check_world_size(seen, asked.world_size)
    job = desk.jobs.scale(job_id, asked.world_size, only, actor=principal)
    desk.nudge()
    response.headers["ETag"] = job_tag(job)
    return job_view(job)


@router.post(
    "/jobs/{job_id}/pause",
    summary="Pause a job that trains synchronously",
    responses=refusals(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    dependencies=[SUBMIT],
)
def pause_job(job_id: KnownJobId, desk: Desk, principal: Principal) -> JobView:
    """Ask for no further step; the ranks stay. Asking again changes nothing."""
    return _set_pause(desk, job_id, principal, paused=True)


@router.post(
    "/jobs/{job_id}/resume",
    summary="Let a paused job go on",
    responses=refusals(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    dependencies=[SUBMIT],
)
def resume_job(job_id: KnownJobId, desk: Desk, principal: Principal) -> JobView:
    """End a pause that was asked for. A job that is not paused stays as it is."""
    return _set_pause(desk, job_id, principal, paused=False)


@router.get(
    "/jobs/{job_id}/workers",
    summary="Everybody who is or was in a job's pool",
    responses=refusals(HTTPStatus.NOT_FOUND),
    dependencies=[READ],
)
def list_workers(job_id: KnownJobId, desk: Desk) -> MemberList:
    job = desk.jobs.get(job_id)
    leaving = desk.members.departures([job_id])[job_id]
    workers = desk.workers.of_job(job_id)
    members = desk.members.of_job(job_id)
    return member_list(job, members, leaving, workers, desk.clock(), agent_state(job))


@router.post(
    "/jobs/{job_id}/workers/{worker_id}/leave",
    summary="Ask an active worker to leave",
    dependencies=[SUBMIT],
    responses=refusals(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
def dismiss_worker(
    job_id: KnownJobId, worker_id: KnownWorkerId, desk: Desk, principal: Principal
) -> JobView:
    """Let a worker go at the next step boundary, and have one rank less from then on."""
    check_lets_go(desk.jobs.get(job_id))
    job = desk.members.request_departure(job_id, worker_id, actor=principal)
    desk.nudge()
    return job_view(job)


def _set_pause(desk: FrontDesk, job_id: JobId, actor: str, *, paused: bool) -> JobView:
    check_pausable(desk.jobs.get(job_id))
    job = desk.jobs.set_pause(job_id, paused=paused, actor=actor)
    desk.nudge()
    return job_view(job)
