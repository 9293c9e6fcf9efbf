"""Logs: the last lines, and a stream of all lines."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Final

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse

from api.access import READ
from api.desk import Desk, FrontDesk
from api.glances import Glance
from api.logs.follow import JobFollower
from api.logs.position import parse_position
from api.logs.tail import LogLine, tail, tail_position
from api.problems import FieldError, InvalidRequest, JobNotFound, invalid_field
from api.queries import KnownJobId
from api.responses import refusals
from api.schemas import LogLineView, LogTail
from muster.contracts.job import JobId
from muster.contracts.layout import LogName
from muster.contracts.rank import ProcessState
from store.records import Job

TAIL_DEFAULT: Final = 200
TAIL_LIMIT: Final = 10_000

POLL_SECONDS: Final = 0.1
RETRY_MILLISECONDS: Final = 2000
PING_SECONDS: Final = 15
SEND_SECONDS: Final = 60
"""A reader that takes nothing for this long is gone."""

router = APIRouter(tags=["logs"])

Rank = Annotated[int | None, Query(ge=0, description="Only this rank's lines.")]


@router.get(
    "/jobs/{job_id}/logs",
    summary="The last lines, all ranks or one",
    response_model=LogTail,
    dependencies=[READ],
    responses=refusals(HTTPStatus.NOT_FOUND)
    | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def get_logs(
    job_id: KnownJobId,
    desk: Desk,
    request: Request,
    tail_: Annotated[int, Query(alias="tail", ge=0, le=TAIL_LIMIT)] = TAIL_DEFAULT,
    rank: Rank = None,
) -> LogTail | Response:
    """Answer with JSON, or with plain text if `Accept` asks for it."""
    _check_rank(desk.jobs.get(job_id), rank)
    lines = tail(desk.files.job(job_id), rank, tail_)
    if "text/plain" in request.headers.get("accept", ""):
        text = "".join(_plain(line, rank) for line in lines)
        return Response(text, media_type="text/plain; charset=utf-8")
    return LogTail(job_id=job_id, tail=tail_, lines=[_view(line) for line in lines])


@router.get(
    "/jobs/{job_id}/logs/stream",
    summary="History, then live lines, as server-sent events",
    response_class=EventSourceResponse,
    dependencies=[READ],
    responses=refusals(HTTPStatus.NOT_FOUND)
    | {
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        204: {"description": "The job is over and everything was delivered."},
    },
)
async def stream_logs(
    *,
    job_id: KnownJobId,
    desk: Desk,
    rank: Rank = None,
    tail_: Annotated[int | None, Query(alias="tail", ge=0, le=TAIL_LIMIT)] = None,
    after: Annotated[str | None, Query(description="The id of the last event seen.")] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Unnamed events carry lines; the event `end` carries the final status and closes."""
    glance = await desk.glances.look(job_id)
    if glance is None:
        raise JobNotFound
    _check_rank(glance.job, rank)
    files = desk.files.job(job_id)
    seen = last_event_id or after
    if seen is not None:
        position = parse_position(seen)
        if position is None:
            raise _no_position("header" if last_event_id else "query")
        follower = JobFollower(files, rank, position)
        rest = await run_sync(follower.next_batch, _is_over(glance))
        if glance.job.is_terminal and rest is None:
            return Response(status_code=HTTPStatus.NO_CONTENT)
    else:
        position = await run_sync(tail_position, files, rank, tail_) if tail_ is not None else {}
    return EventSourceResponse(
        _events(desk, glance.job, JobFollower(files, rank, position)),
        ping=PING_SECONDS,
        send_timeout=SEND_SECONDS,
        sep="\n",
    )


async def _events(
    desk: FrontDesk, job: Job, follower: JobFollower
) -> AsyncIterator[ServerSentEvent]:
    yield ServerSentEvent(retry=RETRY_MILLISECONDS, sep="\n")
    while True:
        # Looked at before the files are read: what had ended by then has written all it will.
        glance = await desk.glances.look(job.job_id)
        if glance is not None and glance.job.uid != job.uid:
            glance = None
        is_over = _is_over(glance)
        while batch := await run_sync(follower.next_batch, is_over, limiter=desk.log_readers):
            yield ServerSentEvent("\n".join(batch.lines), id=batch.position, sep="\n")
            await asyncio.sleep(0)
        if glance is None or glance.job.is_terminal:
            yield _end(job.job_id, glance, follower.position)
            return
        await asyncio.sleep(POLL_SECONDS)


def _is_over(glance: Glance | None) -> Callable[[LogName], bool]:
    """Return which incarnations are known to write no more."""
    if glance is None or glance.job.is_terminal:
        return lambda _name: True
    latest = {worker.rank: worker for worker in glance.workers}

    def is_over(name: LogName) -> bool:
        worker = latest.get(name.rank)
        if worker is None or name.incarnation > worker.incarnation:
            return False
        return name.incarnation < worker.incarnation or worker.state == ProcessState.EXITED

    return is_over


def _end(job_id: JobId, glance: Glance | None, position: str) -> ServerSentEvent:
    job = glance.job if glance else None
    said = {
        "job_id": job_id,
        "status": job.status_shown if job else None,
        "reason": job.reason if job else None,
        "message": job.message if job else "the job was deleted",
        "exit_code": job.exit_code if job else None,
    }
    return ServerSentEvent(json.dumps(said), event="end", id=position, sep="\n")


def _check_rank(job: Job, rank: int | None) -> None:
    most = job.spec.largest_world_size
    if rank is not None and rank >= most:
        raise invalid_field("query", "rank", f"the job has {most} ranks at most, counted from 0")


def _no_position(where: str) -> InvalidRequest:
    field = "last-event-id" if where == "header" else "after"
    message = "is no position of ours: send the id of an event, or leave it out"
    return InvalidRequest([FieldError(loc=(where, field), msg=message, type="value_error")])


def _view(line: LogLine) -> LogLineView:
    time = None if line.micros is None else datetime.fromtimestamp(line.micros / 1e6, UTC)
    return LogLineView(rank=line.name.rank, time=time, line=line.line.text)


def _plain(line: LogLine, rank: int | None) -> str:
    prefix = f"[rank {line.name.rank}] " if rank is None else ""
    return f"{prefix}{line.line.text}\n"
