"""What changes: streams of one job and of the list of jobs, and waits for a status."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec
from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from api.access.auth import Unauthorized
from api.dependencies import READ, AppState, Reauthenticate, Reauthentication, now_and_then
from api.dependencies import State as ServiceState
from api.routes.logs import EVENTS, PING_SECONDS, RETRY_MILLISECONDS, SEND_SECONDS
from api.schema import KnownJobId, refusals
from api.streams import FRESH_SECONDS, JobState
from api.views import point_state, summary
from api.watch import Found, State, event_message, message
from database.errors import JobMissing
from database.records import Job, WorkerRecord
from muster.contracts.job.status import JobId, JobStatus, JobUid

EVENTS_AT_ONCE: Final = 1000
NUMBER_LIMIT: Final = 2**63 - 1
LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)

router = APIRouter(tags=["jobs"])

_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "content": {
            EVENTS: {
                "schema": {
                    "description": "`summary`: first the whole state, then what differs; `event`; "
                    "`checkpoint`: a newer one is durable; `point`: those of one moment by name of "
                    "the series; `end` when nothing will change any more.",
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
async def stream_summaries(state: ServiceState, reauthenticate: Reauthentication) -> Response:
    """Begin with all jobs that are not over; then each job with its fields that differ."""
    read = partial(_list, state, {})
    return _response(_messages(state, "", read, now_and_then(reauthenticate)))


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

    read = partial(_job, state, job, _Seen())
    return _response(_messages(state, job.uid, read, now_and_then(reauthenticate), job_id, seen))


def _response(content: AsyncIterator[bytes]) -> Response:
    return EventSourceResponse(content, ping=PING_SECONDS, send_timeout=SEND_SECONDS, sep="\n")


async def _messages(
    state: AppState,
    key: str,
    read: Callable[[int], Found | None],
    check: Reauthenticate,
    job_id: JobId | None = None,
    seen: int | None = None,
) -> AsyncIterator[bytes]:
    """Yield what one client is sent, until there is no more or its token has ended.

    `seen` is the last event that it has; None if it wants no earlier ones.
    """
    yield ServerSentEvent(retry=RETRY_MILLISECONDS, comment="", sep="\n").encode()
    async with state.watching(key, read) as feed:
        is_behind = True
        while is_behind:
            number, found, last = feed.count, feed.found, feed.last_event
            if found is not None:
                now = state.clock().isoformat()
                yield message("summary", {**found.state, "now": now})
            while job_id is not None and seen is not None and seen < last:
                events = await run_sync(state.history.events, job_id, EVENTS_AT_ONCE, seen)
                for event in events:
                    if (event.event_id or 0) <= last:
                        yield event_message(event)
                seen = (events[-1].event_id or last) if events else last
            async for content in feed.after(number):
                try:
                    await check()
                except Unauthorized:
                    return
                if content is not None:
                    number += 1
                    yield content
            is_behind = number < feed.count
        if feed.failure is None and not state.is_closing():
            yield message("end", {})


@dataclass(slots=True)
class _Seen:
    """The last point and checkpoint that were found."""

    point: datetime | None = None
    checkpoint: int | None = None


def _job(state: AppState, watched: Job, seen: _Seen, after: int) -> Found | None:
    job_id = watched.job_id
    job = state.jobs.find(job_id)
    if job is None or job.uid != watched.uid:
        return None
    view = live_state(job, state.history.workers(job_id), state.clock())
    # The first read needs the newest event and the newest point only.
    events = state.history.events(job_id, EVENTS_AT_ONCE if after else 1, after or None)
    points = state.history.points_after(job_id, seen.point)
    others = [
        ("point", {point.name: point_state(point, job.created_at) for point in own})
        for _, own in groupby(points, attrgetter("at"))
    ]
    if (step := view["last_checkpoint_step"]) != seen.checkpoint:
        others.append(("checkpoint", {"step": step}))
    seen.point = points[-1].at if points else seen.point or LONG_AGO
    seen.checkpoint = step
    return Found(view, events, others, is_over=job.is_terminal)


def _list(state: AppState, known: dict[JobUid, tuple[Job, State]], _after: int) -> Found:
    """Return the jobs that are not over, and once more each that has ended since the last read."""
    now = state.clock()
    jobs = state.jobs.unfinished([job for job, _ in known.values() if not job.is_terminal])
    before = {uid: job for uid, (job, _) in known.items() if not job.is_terminal}
    for uid in before.keys() - {job.uid for job in jobs}:
        last = state.jobs.find(before[uid].job_id)
        if last is not None and last.uid == uid:
            jobs.append(last)
    ranks = state.history.workers_by_job([job.job_id for job in jobs])
    known.clear()
    for job in jobs:
        view = live_state(job, ranks.get(job.job_id, []), now)
        del view["workers"]
        known[job.uid] = job, view
    return Found({"jobs": {job.job_id: view for job, view in known.values()}})


def live_state(job: Job, ranks: Sequence[WorkerRecord], now: datetime) -> State:
    """Return the summary as JSON, with workers by rank, and instead of ages the times."""
    view = summary(job, ranks, now)
    found: State = msgspec.to_builtins(view)
    seen = {rank.rank: rank.last_heartbeat_at for rank in ranks}
    for worker in found["workers"]:
        del worker["last_heartbeat_age_seconds"]
        at = seen.get(worker["rank"])
        worker["seen_at"] = None if at is None else at.isoformat()
    found["workers"] = {str(worker["rank"]): worker for worker in found["workers"]}
    found["living"] = view.living
    return found


async def wait_for_status(
    state: AppState,
    request: Request,
    job_id: JobId,
    wanted: Collection[JobStatus],
    timeout_seconds: float,
    reauthenticate: Reauthenticate,
) -> Job:
    """Return the job once it has a wanted status, or as it is after the timeout.

    Also returns when the client has gone or the service ends. Raises `Unauthorized` once its token
    has ended, and `JobMissing` once there is no such job, or another one under its id. Uses the
    reads that streams share, so any number of waits for a job costs one database read per
    `FRESH_SECONDS` and no thread.
    """
    clock, check = asyncio.get_running_loop().time, now_and_then(reauthenticate)
    deadline = clock() + timeout_seconds
    # A shared read may be older than what this client knows, and may be of an earlier job.
    job = _job_in(await state.job_cache.get(job_id, is_current=True), job_id)
    uid = job.uid
    while job.status_shown not in wanted and not state.is_closing():
        if clock() >= deadline or await request.is_disconnected():
            break
        await asyncio.sleep(FRESH_SECONDS)
        await check()
        job = _job_in(await state.job_cache.get(job_id), job_id)
        if job.uid != uid:
            raise JobMissing(job_id)
    return job


def _job_in(state: JobState | None, job_id: JobId) -> Job:
    if state is None:
        raise JobMissing(job_id)
    return state.job
