"""Logs: the last lines, and a stream of all lines."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Annotated, Final

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request, Response
from sse_starlette.sse import EventSourceResponse

from api.access import READ
from api.desk import Desk, FrontDesk
from api.glances import Glance, is_over_in
from api.identity import Caller
from api.log_answers import OBJECTS, PLAIN, as_document, as_objects, as_text
from api.log_questions import TAIL_DEFAULT, AskedFilters, AskedPart
from api.logs.follow import JobFollower
from api.logs.position import Position, format_event_id
from api.logs.tail import Wanted, tail, tail_position
from api.problems import JobNotFound, invalid_field
from api.queries import KnownJobId
from api.responses import refusals
from api.schemas import LogTail
from api.sse import beginning, encoded
from store.records import Job

EVENTS: Final = "text/event-stream"

PING_SECONDS: Final = 15
SEND_SECONDS: Final = 60
"""A reader that takes nothing for this long is gone."""

GRACE_SECONDS: Final = 2
"""For streams to end in order when the service does."""

_EVENT: Final = {
    "description": "One event: lines of logs, or with a name something else.",
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
}

_FORMS: Final = {
    PLAIN: {"schema": {"type": "string"}},
    OBJECTS: {"schema": {"type": "string"}},
    EVENTS: {"schema": _EVENT},
}

router = APIRouter(tags=["logs"])


@router.get(
    "/jobs/{job_id}/logs",
    summary="The last lines, all ranks or one",
    response_model=LogTail,
    dependencies=[READ],
    responses=refusals(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
    | {
        200: {"content": _FORMS},
        204: {"description": "With `follow`: all was delivered."},
    },
)
async def get_logs(
    *,
    job_id: KnownJobId,
    desk: Desk,
    request: Request,
    response: Response,
    part: AskedPart,
    filters: AskedFilters,
    follow: Annotated[bool, Query(description="The same as `/logs/stream`.")] = False,
) -> LogTail | Response:
    """Answer with JSON, or as `Accept` asks: plain text, or one JSON object a line.

    A search looks at 32 MiB of lines, the newest first; where there are more, the header
    `X-Log-Incomplete` says so.
    """
    if follow:
        _refuse(filters)
        return await stream_logs(job_id, desk, part)
    job = await run_sync(desk.jobs.get, job_id)
    _check_rank(job, part.rank)
    wanted = replace(filters, rank=part.rank, after=part.position_in(job) or {})
    count = TAIL_DEFAULT if part.tail is None else part.tail
    look = partial(tail, desk.files.job(job_id), wanted, count)
    is_search = filters != Wanted()
    caller: Caller = request.scope["state"]["caller"]
    found = await (desk.searches.run(caller.name, look) if is_search else run_sync(look))
    accepted = request.headers.get("accept", "")
    if PLAIN in accepted:
        return as_text(found, part.rank)
    return as_objects(found) if OBJECTS in accepted else as_document(job_id, count, found, response)


@router.get(
    "/jobs/{job_id}/logs/stream",
    summary="History, then live lines, as server-sent events",
    response_class=EventSourceResponse,
    dependencies=[READ],
    responses=refusals(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
    | {
        200: {"content": {EVENTS: _FORMS[EVENTS]}},
        204: {"description": "The job is over and everything was delivered."},
    },
)
async def stream_logs(job_id: KnownJobId, desk: Desk, part: AskedPart) -> Response:
    """Unnamed events carry lines; the event `end` carries the final status and closes."""
    glance = await desk.glances.look_anew(job_id)
    if glance is None:
        raise JobNotFound
    _check_rank(glance.job, part.rank)
    files = desk.files.job(job_id)
    position = part.position_in(glance.job)
    if position is not None and glance.job.is_terminal:
        follower = JobFollower(files, part.rank, position)
        if await run_sync(follower.next_batch, is_over_in(glance)) is None:
            return Response(status_code=HTTPStatus.NO_CONTENT)
    elif position is None and part.tail is not None:
        position = await run_sync(tail_position, files, part.rank, part.tail)
    return EventSourceResponse(
        _events(desk, glance.job, part.rank, position or {}),
        ping=PING_SECONDS,
        send_timeout=SEND_SECONDS,
        shutdown_grace_period=GRACE_SECONDS,
        sep="\n",
    )


async def _events(
    desk: FrontDesk, job: Job, rank: int | None, position: Position
) -> AsyncIterator[bytes]:
    yield beginning(format_event_id(job.uid, position))
    async with desk.feeds.of(job, rank) as feed:
        async for event in feed.follow(position):
            position = event.position
            yield event.wire
        glance = await feed.end()
    # Otherwise it is the service that ends: whoever comes back goes on from here.
    if glance is None or glance.job.is_terminal:
        yield _end(job, glance, position)


def _end(followed: Job, glance: Glance | None, position: Position) -> bytes:
    job = glance.job if glance else None
    said = {
        "job_id": followed.job_id,
        "status": job.status_shown if job else None,
        "reason": job.reason if job else None,
        "message": job.message if job else "the job was deleted",
        "exit_code": job.exit_code if job else None,
    }
    return encoded(format_event_id(followed.uid, position), json.dumps(said), "end")


def _check_rank(job: Job, rank: int | None) -> None:
    most = job.spec.largest_world_size
    if rank is not None and rank >= most:
        raise invalid_field("query", "rank", f"the job has {most} ranks at most, counted from 0")


def _refuse(filters: Wanted) -> None:
    if filters != Wanted():
        raise invalid_field(
            "query", "follow", "a stream takes rank, tail and after: leave other filters out"
        )
