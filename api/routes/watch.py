"""Streams of what changes: of one job, and of the list of jobs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from api.dependencies import READ, AppState, CurrentCaller, Reauthenticate, Reauthentication
from api.dependencies import State as ServiceState
from api.routes.logs import EVENTS, PING_SECONDS, RETRY_MILLISECONDS, SEND_SECONDS, is_still_valid
from api.schema import KnownJobId, refusals
from api.streams import IDLE_SECONDS
from api.views import summary
from api.watch import Found, Reader, State, event_message, message
from database.records import Job, RankRecord
from muster.contracts.job import JobId, JobUid

EVENTS_AT_ONCE: Final = 1000
NUMBER_LIMIT: Final = 2**63 - 1

router = APIRouter(tags=["jobs"])

_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "content": {
            EVENTS: {
                "schema": {
                    "description": "`summary`: first the whole state, then what differs; `event`; "
                    "`end` when nothing will change any more.",
                    "type": "string",
                }
            }
        }
    }
}


@router.get(
    "/jobs/summaries/stream",
    summary="What changes in the list of jobs, as server-sent events",
    response_class=EventSourceResponse,
    dependencies=[READ],
    responses=_STREAM,
)
async def stream_summaries(
    state: ServiceState, caller: CurrentCaller, reauthenticate: Reauthentication
) -> Response:
    """Begin with all jobs that are not over; then each job with its fields that differ."""
    known: dict[JobUid, tuple[Job, State]] = {}

    async def look(_after: int) -> Found:
        return await run_sync(_list, state, known)

    return _stream(state, "", look, 0, reauthenticate if caller.token_id is not None else None)


@router.get(
    "/jobs/{job_id}/watch",
    summary="What changes of one job, as server-sent events",
    response_class=EventSourceResponse,
    dependencies=[READ],
    responses=refusals(404) | _STREAM,
)
async def watch_job(
    *,
    job_id: KnownJobId,
    state: ServiceState,
    caller: CurrentCaller,
    reauthenticate: Reauthentication,
    after: Annotated[
        int | None, Query(ge=0, le=NUMBER_LIMIT, description="The last `event_id` seen.")
    ] = None,
    last_event_id: Annotated[str | None, Header(description="The same; it takes precedence.")] = (
        None
    ),
) -> Response:
    """Begin with the summary, its `workers` by rank, and the events after `after`."""
    job = await run_sync(state.jobs.get, job_id)
    seen = int(last_event_id) if last_event_id and last_event_id.isdecimal() else after

    async def look(after: int) -> Found | None:
        return await run_sync(_job, state, job_id, job.uid, after)

    check = reauthenticate if caller.token_id is not None else None
    return _stream(state, job.uid, look, seen, check, job_id)


def _stream(
    state: AppState,
    key: str,
    look: Callable[[int], Awaitable[Found | None]],
    seen: int | None,
    reauthenticate: Reauthenticate | None,
    job_id: JobId | None = None,
) -> Response:
    async def events_between(first: int | None, last: int) -> Sequence[Any]:
        if job_id is None or first is None or first >= last:
            return []
        found = await run_sync(state.history.events, job_id, EVENTS_AT_ONCE, first)
        return [event for event in found if (event.event_id or 0) <= last]

    async def content() -> AsyncIterator[bytes]:
        yield ServerSentEvent(retry=RETRY_MILLISECONDS, comment="", sep="\n").encode()
        after, is_behind = seen, True
        async with state.watches.watching(key, look) as feed:
            while is_behind:
                reader, found, last = feed.join(), feed.found, feed.last_event
                if found is not None:
                    yield message("summary", {**found.state, "now": state.clock().isoformat()})
                for event in await events_between(after, last):
                    yield event_message(event)
                after = None if after is None else last
                async for news in _news(reader, reauthenticate):
                    yield news
                feed.readers.discard(reader)
                is_behind = reader.is_late
            if feed.is_over and not state.is_closing():
                yield message("end", {})

    return EventSourceResponse(content(), ping=PING_SECONDS, send_timeout=SEND_SECONDS, sep="\n")


async def _news(reader: Reader, reauthenticate: Reauthenticate | None) -> AsyncIterator[bytes]:
    """Yield what changes until there is no more, or the caller has no right to it any more."""
    while True:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                content = await reader.get()
        except TimeoutError:
            if reauthenticate is not None and not await is_still_valid(reauthenticate):
                return
            continue
        if content is None:
            return
        yield content


def _job(state: AppState, job_id: JobId, uid: JobUid, after: int) -> Found | None:
    job = state.jobs.find(job_id)
    if job is None or job.uid != uid:
        return None
    ranks = state.history.ranks(job_id)
    # The first look needs the id of the newest one only.
    events = state.history.events(job_id, EVENTS_AT_ONCE if after else 1, after or None)
    return Found(live_state(job, ranks, state.clock()), events, is_over=job.is_terminal)


def _list(state: AppState, known: dict[JobUid, tuple[Job, State]]) -> Found:
    now = state.clock()
    jobs = state.jobs.unfinished([job for job, _ in known.values() if not job.is_terminal])
    ended = known.keys() - {job.uid for job in jobs}
    for uid in ended:
        job, _ = known[uid]
        last = state.jobs.find(job.job_id) if not job.is_terminal else job
        if last is None or last.uid != uid:
            del known[uid]
        elif last is not job:
            jobs.append(last)
    ranks = state.history.ranks_by_job([job.job_id for job in jobs])
    for job in jobs:
        view = live_state(job, ranks.get(job.job_id, []), now)
        del view["workers"]
        known[job.uid] = job, view
    return Found({"jobs": {job.job_id: view for job, view in known.values()}})


def live_state(job: Job, ranks: Sequence[RankRecord], now: datetime) -> State:
    """Return the summary as JSON, with workers by rank, and instead of ages the times."""
    view = summary(job, ranks, now)
    found: State = msgspec.to_builtins(view)
    heard = {rank.rank: rank.last_heartbeat_at for rank in ranks}
    for worker in found["workers"]:
        del worker["last_heartbeat_age_seconds"]
        at = heard.get(worker["rank"])
        worker["heard_at"] = None if at is None else at.isoformat()
    found["workers"] = {str(worker["rank"]): worker for worker in found["workers"]}
    found["living"] = view.living
    return found
