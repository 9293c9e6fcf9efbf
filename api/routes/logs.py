"""Logs of a job: the last lines, and a stream of all lines."""

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import AwareDatetime
from sse_starlette import EventSourceResponse, ServerSentEvent

from api.access.auth import Unauthorized
from api.dependencies import (
    READ,
    AppState,
    Reauthenticate,
    Reauthentication,
    State,
    now_and_then,
)
from api.errors import Conflict, invalid_field
from api.schema import KnownJobId, refusals, returns
from api.streams import JobState, LogFeed, finished_logs
from database.errors import JobMissing
from database.records import Job
from muster.contracts.views.history import LogLineView, LogTail
from muster.logs.source import (
    Lines,
    LogFilter,
    Micros,
    Position,
    format_event_id,
    parse_event_id,
)

PLAIN: Final = "text/plain"
NDJSON: Final = "application/x-ndjson"
EVENTS: Final = "text/event-stream"

TAIL_DEFAULT: Final = 200
TAIL_LIMIT: Final = 10_000
GREP_LIMIT: Final = 1000

PING_SECONDS: Final = 15
SEND_SECONDS: Final = 60
"""A client that reads nothing for this long is disconnected."""

RETRY_MILLISECONDS: Final = 2000
"""How long a client waits before it reconnects."""

SHUTDOWN_SECONDS: Final = 2
"""For streams to end properly when the service stops."""

_EVENT: Final = {
    "description": "One event: log lines, or with a name something else.",
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
}

_FORMS: Final = {
    PLAIN: {"schema": {"type": "string"}},
    NDJSON: {"schema": {"type": "string"}},
    EVENTS: {"schema": _EVENT},
}

router = APIRouter(tags=["logs"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """The part of a job's logs that a tail or a stream is asked for."""

    rank: Annotated[int | None, Query(ge=0, description="Only this rank's lines.")] = None
    tail: Annotated[
        int | None,
        Query(
            ge=0,
            le=TAIL_LIMIT,
            description=f"Only the last lines. Default: {TAIL_DEFAULT}, and for a stream all.",
        ),
    ] = None
    after: Annotated[str | None, Query(description="The id of the last event seen.")] = None
    last_event_id: Annotated[str | None, Header(description="The same; it takes precedence.")] = (
        None
    )

    def position_in(self, job: Job) -> Position | None:
        """Return where to resume; raise `InvalidRequest`, or `Conflict` for another job's logs."""
        text = self.last_event_id or self.after
        if text is None:
            return None
        seen = parse_event_id(text)
        if seen is None:
            place = ("header", "last-event-id") if self.last_event_id else ("query", "after")
            message = "not a valid position: send the id of an event, or leave it out"
            raise invalid_field(*place, message)
        prefix, position = seen
        if not job.uid.startswith(prefix):
            raise Conflict(
                "position-of-another-job",
                f"This position belongs to an earlier job {job.job_id}, which was deleted. Leave "
                "it out to read this job from its beginning.",
            )
        return position


async def _log_filter(
    attempt: Annotated[
        int | None, Query(ge=0, description="Only this process of each rank; the first is 0.")
    ] = None,
    since: Annotated[
        AwareDatetime | None, Query(description="Only what was written then or later.")
    ] = None,
    until: Annotated[
        AwareDatetime | None, Query(description="Only what was written by then.")
    ] = None,
    grep: Annotated[
        str | None, Query(max_length=GREP_LIMIT, description="Only lines with this text.")
    ] = None,
) -> LogFilter:
    return LogFilter(attempt=attempt, since=_micros(since), until=_micros(until), text=grep)


RequestedPart = Annotated[LogPart, Depends()]
RequestedFilter = Annotated[LogFilter, Depends(_log_filter)]


@router.get(
    "/jobs/{job_id}/logs",
    summary="The last lines, all ranks or one",
    dependencies=[READ],
    responses=refusals(404, 409)
    | {
        200: {
            "description": "Successful Response",
            "content": {**returns(LogTail)[200]["content"], **_FORMS},
        },
        204: {"description": "With `follow`: everything was delivered."},
    },
)
async def get_logs(
    *,
    job_id: KnownJobId,
    state: State,
    request: Request,
    reauthenticate: Reauthentication,
    part: RequestedPart,
    filters: RequestedFilter,
    follow: Annotated[bool, Query(description="The same as `/logs/stream`.")] = False,
) -> Response:
    """Answer with JSON or, as `Accept` asks, with plain text or one JSON object a line.

    A search reads the newest 32 MiB of lines; if there are more, the header `X-Log-Incomplete`
    says so.
    """
    is_search = filters != LogFilter()
    if follow:
        if is_search:
            detail = "a stream takes rank, tail and after: leave other filters out"
            raise invalid_field("query", "follow", detail)
        return await stream_logs(job_id, state, reauthenticate, part)
    job = await run_sync(state.jobs.get, job_id)
    _check_rank(job, part.rank)
    wanted = replace(filters, rank=part.rank, after=part.position_in(job) or {})
    count = TAIL_DEFAULT if part.tail is None else part.tail
    found = await run_sync(
        partial(state.logs_of(job_id).tail, wanted, count),
        limiter=state.log_searches if is_search else None,
    )
    accepted = request.headers.get("accept", "")
    views = [line_view(line) for line in found.lines]
    if PLAIN in accepted:
        form = "[rank {0.rank}] {0.line}\n" if part.rank is None else "{0.line}\n"
        content = "".join(map(form.format, views)).encode()
        media_type = f"{PLAIN}; charset=utf-8"
    elif NDJSON in accepted:
        content, media_type = msgspec.json.Encoder().encode_lines(views), NDJSON
    else:
        document = LogTail(job_id=job_id, tail=count, lines=views)
        content, media_type = msgspec.json.encode(document), "application/json"
    # Earlier lines may match a search as well.
    headers = {} if found.is_complete else {"X-Log-Incomplete": "true"}
    return Response(content, headers=headers, media_type=media_type)


@router.get(
    "/jobs/{job_id}/logs/stream",
    summary="History, then live lines, as server-sent events",
    response_class=EventSourceResponse,
    dependencies=[READ],
    responses=refusals(404, 409)
    | {
        200: {"content": {EVENTS: _FORMS[EVENTS]}},
        204: {"description": "The job is over and everything was delivered."},
    },
)
async def stream_logs(
    job_id: KnownJobId,
    state: State,
    reauthenticate: Reauthentication,
    part: RequestedPart,
) -> Response:
    """Unnamed events carry lines; the event `end` carries the final status and closes."""
    found = await state.job_cache.get(job_id, is_current=True)
    if found is None:
        raise JobMissing(job_id)
    _check_rank(found.job, part.rank)
    logs = state.logs_of(job_id)
    position = part.position_in(found.job)
    if position is not None and found.job.is_terminal:
        follower = logs.follow(part.rank, position)
        if not await run_sync(follower.next_batch, finished_logs(found)):
            return Response(status_code=HTTPStatus.NO_CONTENT)
    elif position is None and part.tail is not None:
        position = await run_sync(logs.tail_position, part.rank, part.tail)
    return EventSourceResponse(
        _events(state, found.job, part.rank, position or {}, now_and_then(reauthenticate)),
        ping=PING_SECONDS,
        send_timeout=SEND_SECONDS,
        shutdown_grace_period=SHUTDOWN_SECONDS,
        sep="\n",
    )


def feed_of(state: AppState, job: Job, rank: int | None) -> AbstractAsyncContextManager[LogFeed]:
    """Return the feed of a job's logs, of all ranks or one, for as long as a client reads it."""
    make = partial(
        LogFeed,
        logs=state.logs_of(job.job_id),
        job=job,
        rank=rank,
        jobs=state.job_cache,
        is_closing=state.is_closing,
        threads=state.log_readers,
    )
    return state.feeds.reading((job.uid, rank), make)


async def _events(
    state: AppState,
    job: Job,
    rank: int | None,
    position: Position,
    check: Reauthenticate,
) -> AsyncIterator[bytes]:
    """Yield encoded events until the job is over, the service stops or the token is revoked."""
    # A client that sees no event resumes from here.
    start = format_event_id(job.uid, position)
    yield ServerSentEvent(id=start, retry=RETRY_MILLISECONDS, sep="\n").encode()
    async with feed_of(state, job, rank) as feed:
        async for event in feed.events(position):
            try:
                await check()
            except Unauthorized:
                return
            if event is not None:
                position = event.position
                yield event.encoded
        final = await feed.final_state()
    # If the service stops, there is no `end`: the client resumes from `position`.
    if final is None or final.job.is_terminal:
        yield _end_event(job, final, position)


def _end_event(followed: Job, final: JobState | None, position: Position) -> bytes:
    job = final.job if final else None
    result = {
        "job_id": followed.job_id,
        "status": job.status_shown if job else None,
        "reason": job.reason if job else None,
        "message": job.message if job else "the job was deleted",
        "exit_code": job.exit_code if job else None,
    }
    event_id = format_event_id(followed.uid, position)
    return ServerSentEvent(json.dumps(result), event="end", id=event_id, sep="\n").encode()


def _check_rank(job: Job, rank: int | None) -> None:
    most = job.spec.largest_world_size
    if rank is not None and rank >= most:
        raise invalid_field("query", "rank", f"the job has at most {most} ranks, counted from 0")


def _micros(moment: datetime | None) -> Micros | None:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return None if moment is None else (moment - epoch) // timedelta(microseconds=1)


def line_view(line: Lines) -> LogLineView:
    time = None if line.micros is None else datetime.fromtimestamp(line.micros / 1e6, UTC)
    return LogLineView(rank=line.name.rank, time=time, line=line.text)
