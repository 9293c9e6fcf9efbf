"""Jobs: submit, list, show, wait, stop, strike; their events, attempts and audit."""

import hashlib
import json
import shutil
from contextlib import ExitStack
from http import HTTPStatus
from typing import Annotated, Final, TypeAlias

import msgspec
from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response
from msgspec import Meta
from msgspec.json import Decoder

from api.dependencies import READ, SUBMIT, AppState, CurrentCaller, Reauthentication, State
from api.errors import Conflict, Problem, invalid_field
from api.listing import (
    DEFAULT_LIMIT,
    Cursor,
    IfNoneMatch,
    PageLimit,
    RequestedPage,
    decode_cursor,
    jobs_of,
    one_page,
    reply_tagged,
    statuses_of,
    weak_tag,
)
from api.routes.watch import wait_for_status
from api.schema import FaultBody, KnownJobId, StopBody, body, operation, refusals, reply, returns
from api.submission import at_home
from api.views import audit_view, job_tag, job_view, series_list, summary
from database.errors import JobExists, JobOver
from database.history import AttemptPosition
from database.idempotency import IdempotencyKey
from database.jobs import JobQuery, NewJob
from database.records import Job
from muster.cluster.requests import planned_request
from muster.contracts.errors import MusterError
from muster.contracts.job.spec import JobRequest, JobSpec
from muster.contracts.job.status import TERMINAL, JobUid, StopRequest
from muster.contracts.leaderboard import SWEEP_LABEL, compare, which_sweep
from muster.contracts.series import POINTS_LIMIT
from muster.contracts.shards import Reading, ranges
from muster.contracts.views.history import (
    AttemptList,
    AuditView,
    EventList,
    FaultView,
    SeriesList,
    StruckProcess,
)
from muster.contracts.views.job import (
    JobList,
    JobPlan,
    JobView,
    LeaderboardView,
    SummaryList,
    SummaryView,
)
from muster.contracts.views.view import Moment
from muster.host.processes import module_command
from muster.host.trace import stamp

KEY_LIMIT: Final = 255
"""Longest Idempotency-Key, as with other services."""

WAIT_LIMIT_SECONDS: Final = 60.0
"""Proxies close a connection that is silent for longer."""

UNTIL_TERMINAL: Final = "terminal"

DEFAULT_POINTS: Final = 500  # about what a screen can show

NUMBER_LIMIT: Final = 2**63 - 1
"""The largest integer of the databases."""

_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
ATTEMPT_PLACES: Final[Decoder[AttemptPosition]] = Decoder(tuple[Moment, _Count, _Count])

router = APIRouter(tags=["jobs"])


@router.post(
    "/jobs",
    status_code=201,
    summary="Create a job",
    responses=returns(JobView, 201) | returns(JobPlan, 200) | refusals(409),
    dependencies=[SUBMIT],
)
async def create_job(
    *,
    requested: Annotated[JobRequest, body(JobRequest)],
    state: State,
    caller: CurrentCaller,
    request: Request,
    dry_run: Annotated[bool, Query(description="Check and plan it; store nothing.")] = False,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=KEY_LIMIT)] = None,
) -> Response:
    """Store a job durably, then respond; a dry run responds 200 with the plan.

    A request repeated with the same `Idempotency-Key` returns the original response, even if the
    job has changed since.
    """
    stamp("job received")
    requested = at_home(requested, request.scope["state"].get("user"))
    if dry_run:
        return reply(await run_sync(planned, requested, state))
    key = None
    if idempotency_key is not None:
        content = json.dumps(await request.json(), sort_keys=True, separators=(",", ":"))
        key = IdempotencyKey(
            principal=caller.principal,
            key=idempotency_key,
            request_sha256=hashlib.sha256(content.encode()).hexdigest(),
        )
    uid = JobUid(state.submitter.random_hex())
    job = await create(requested, state, uid, key, caller.name)
    stamp("job stored", job=job.uid)
    headers = {"Location": f"{request.scope['path']}/{job.job_id}", "ETag": job_tag(job)}
    if job.uid != uid:
        headers["Idempotency-Replayed"] = "true"
    return reply(job_view(job), HTTPStatus.CREATED, headers)


@router.get("/jobs", **operation("List jobs, newest first", READ, JobList, 304))
def list_jobs(
    *,
    state: State,
    caller: CurrentCaller,
    page: RequestedPage,
    request: Request,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return one page; `X-Total-Count` counts all jobs, and `Link` leads to the next page."""
    jobs, headers = jobs_of(page, state, request)
    tag = weak_tag(request, headers["X-Total-Count"], [job.row_version for job in jobs])
    return reply_tagged(
        tag, if_none_match, lambda: JobList(jobs=[job_view(job, caller) for job in jobs]), headers
    )


# Before /jobs/{job_id}, which would take "summaries" for an id.
@router.get(
    "/jobs/summaries", **operation("Summaries of jobs, newest first", READ, SummaryList, 304)
)
def list_summaries(
    state: State, page: RequestedPage, request: Request, if_none_match: IfNoneMatch = None
) -> Response:
    """Return one page, as the list of jobs does. The ETag ignores ages of heartbeats."""
    jobs, headers = jobs_of(page, state, request)
    workers = state.history.workers_by_job([job.job_id for job in jobs])
    versions = [job.row_version for job in jobs]
    tag = weak_tag(request, headers["X-Total-Count"], [versions, list(workers.items())])

    def view() -> SummaryList:
        now = state.clock()
        return SummaryList(jobs=[summary(job, workers.get(job.job_id, []), now) for job in jobs])

    return reply_tagged(tag, if_none_match, view, headers)


@router.get(
    "/leaderboard", **operation("Compare the jobs of a sweep by loss", READ, LeaderboardView, 404)
)
def get_leaderboard(
    state: State,
    caller: CurrentCaller,
    sweep: Annotated[str | None, Query(description="A value of the label `sweep`.")] = None,
) -> Response:
    """Return the newest 1000 jobs of a sweep, without `sweep` of the only one: best first."""
    known = state.jobs.sweeps()
    if not sweep and len(known) == 1:
        (sweep,) = known
    if not sweep:
        return reply(compare(None, [], [], known))
    if sweep not in known:
        raise Problem(HTTPStatus.NOT_FOUND, "sweep-not-found", which_sweep(known, sweep))
    query = JobQuery(labels={SWEEP_LABEL: sweep})
    jobs = state.jobs.page(query, DEFAULT_LIMIT, None)[::-1]  # of equal ones the oldest comes first
    ranks, now = state.history.workers_by_job([job.job_id for job in jobs]), state.clock()
    summaries = [summary(job, ranks.get(job.job_id, []), now) for job in jobs]
    # Not the specs of the rows: a view hides the values of `env` from a caller of scope read.
    specs = [job_view(job, caller).spec for job in jobs]
    return reply(compare(sweep, summaries, specs, known))


@router.get("/jobs/{job_id}", **operation("Status of one job", READ, JobView, 404, 304))
async def get_job(  # noqa: PLR0913  a query has many parameters
    *,
    job_id: KnownJobId,
    state: State,
    caller: CurrentCaller,
    request: Request,
    reauthenticate: Reauthentication,
    wait: Annotated[
        float, Query(ge=0, le=WAIT_LIMIT_SECONDS, description="Most seconds to wait for `until`.")
    ] = 0,
    until: Annotated[
        list[str],
        Query(
            description="What to wait for: `terminal`, or statuses; may be repeated. The end of "
            "the job ends every wait."
        ),
    ] = [UNTIL_TERMINAL],  # noqa: B006  FastAPI copies it
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return the job at once, or with `wait` as soon as it has the requested status.

    After that time the job is returned as it is: check its status.
    """
    named = [word for word in until if word.lower() != UNTIL_TERMINAL]
    wanted = TERMINAL | frozenset(statuses_of(named, "until") if named else [])
    if wait:
        job = await wait_for_status(state, request, job_id, wanted, wait, reauthenticate)
    else:
        job = await run_sync(state.jobs.get, job_id)
    return reply_tagged(job_tag(job), if_none_match, lambda: job_view(job, caller))


@router.get(
    "/jobs/{job_id}/summary",
    **operation("Progress of one job and all its workers", READ, SummaryView, 404, 304),
)
def get_summary(
    job_id: KnownJobId, state: State, request: Request, if_none_match: IfNoneMatch = None
) -> Response:
    """Return the present numbers. The ETag ignores ages of heartbeats."""
    job, workers = state.jobs.get(job_id), state.history.workers(job_id)
    tag = weak_tag(request, job.row_version, workers)
    return reply_tagged(tag, if_none_match, lambda: summary(job, workers, state.clock()))


@router.post("/jobs/{job_id}/stop", **operation("Stop a job gracefully", SUBMIT, JobView, 404))
def stop_job(
    job_id: KnownJobId,
    state: State,
    caller: CurrentCaller,
    requested: Annotated[StopBody, body(StopBody, is_optional=True)],
) -> Response:
    """Ask for a last checkpoint and an end. A job that is over stays as it is."""
    job = state.request_stop(
        job_id,
        StopRequest.GRACEFUL,
        requested.grace_seconds,
        actor=caller.name,
        why=requested.reason,
    )
    return reply(job_view(job))


@router.get(
    "/jobs/{job_id}/events", **operation("Events of a job, oldest first", READ, EventList, 404)
)
def list_events(
    job_id: KnownJobId,
    state: State,
    limit: Annotated[int, Query(ge=1, le=DEFAULT_LIMIT)] = DEFAULT_LIMIT,
    after: Annotated[int | None, Query(ge=0, le=NUMBER_LIMIT)] = None,
) -> Response:
    """Return the last events, or the first ones after the `event_id` `after`."""
    state.jobs.get(job_id)
    events = state.history.events(job_id, limit, after)
    return reply(EventList(job_id=job_id, events=events))


@router.get(
    "/jobs/{job_id}/series",
    **operation("Loss, throughput and metrics by step and time", READ, SeriesList, 404),
)
def get_series(
    job_id: KnownJobId,
    state: State,
    names: Annotated[
        list[str], Query(description="Only these, also joined by commas; may be repeated.")
    ] = [],  # noqa: B006  FastAPI copies it
    points: Annotated[
        int, Query(ge=1, le=POINTS_LIMIT, description="About how many of each series at most.")
    ] = DEFAULT_POINTS,
) -> Response:
    """Return the points of each series; `names` lists all there are, whichever are asked for.

    Where neighbours are merged, first, least, greatest and last value stay those of all values.
    """
    job = state.jobs.get(job_id)
    wanted = {name for text in names for name in (text, *text.split(","))}
    known, found = state.history.series(job_id, wanted)
    return reply(series_list(job, known, found, points))


@router.get(
    "/jobs/{job_id}/attempts",
    **operation("Every process of a job, the newest first", READ, AttemptList, 404),
)
def list_attempts(
    job_id: KnownJobId,
    state: State,
    request: Request,
    limit: PageLimit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """Return for each attempt of each rank when it began, how it ended, and what followed."""
    state.jobs.get(job_id)
    after = decode_cursor(cursor, ATTEMPT_PLACES)
    found, headers = one_page(
        request,
        state.history.attempts(job_id, limit + 1, after),
        limit,
        state.history.attempt_count(job_id),
        lambda last: (last.started_at, last.rank, last.attempt),
    )
    return reply(AttemptList(job_id=job_id, attempts=list(found)), headers=headers)


@router.get(
    "/jobs/{job_id}/audit",
    **operation("Whether every sample was read exactly once", READ, AuditView, 404),
)
def get_audit(
    job_id: KnownJobId,
    state: State,
    limit: Annotated[
        int, Query(ge=1, le=DEFAULT_LIMIT, description="Most epochs and most checkpoints shown.")
    ] = DEFAULT_LIMIT,
) -> Response:
    """Compare the committed samples with the data set.

    The result covers every epoch, including those that are not listed.
    """
    job = state.jobs.get(job_id)
    audit = state.history.audit(job_id, limit)
    return reply(audit_view(job, audit, state.history.ranks(job_id)))


@router.post(
    "/jobs/{job_id}/faults",
    **operation("Strike a rank, or a host", SUBMIT, FaultView, 404, 409, status=202),
)
def request_fault(
    job_id: KnownJobId,
    state: State,
    caller: CurrentCaller,
    asking: Annotated[FaultBody, body(FaultBody)],
) -> Response:
    """Send a signal to the present process of a rank, or kill a host's ranks and their agent.

    The event `fault_injected` of each process has the time; or it is `fault_dropped`, and says why.
    """
    if (asking.rank is None) == (asking.host is None):
        raise invalid_field("body", "rank", "give either a rank or a host")
    if asking.host is not None and asking.fault != "kill":
        raise invalid_field("body", "fault", "a host can only be killed")
    job, ranks = state.jobs.get(job_id), state.history.ranks(job_id)
    if job.is_terminal:
        raise JobOver(job_id, job.status)
    if absence := state.coordinator.absence():
        raise Conflict("no-coordinator", f"Nothing can be struck: {absence}.")
    asked = asking.host and state.host_named(asking.host)
    meant = [rank for rank in ranks if rank.rank == asking.rank or rank.host == asked]
    what = f"rank {asking.rank}" if asking.host is None else f"rank on host {asking.host[:63]}"
    if not meant:
        hosts = sorted({state.host_name(rank.host) for rank in ranks})
        where = ", ".join(hosts) or "no host yet"
        detail = f"{job_id} has no {what}: it has {len(ranks)} ranks, on {where}."
        raise Problem(HTTPStatus.NOT_FOUND, "rank-not-found", detail)
    processes = [
        StruckProcess(rank=rank.rank, attempt=rank.attempt, pid=rank.process.pid)
        for rank in meant
        if rank.process is not None
    ]
    if not processes:
        detail = f"{job_id} has no process of {what} now: wait for it, see muster show {job_id}."
        raise Conflict("no-process", detail)
    of_job = state.history.agents_by_job([job_id])[job_id]
    agents = {agent.host: agent.agent_number for agent in of_job}
    agent, host = agents.get(asked or ""), meant[0].host
    fault = FaultView(number=0, fault=asking.fault, host=host, agent=agent, processes=processes)
    requested = state.jobs.request_fault(job, fault, actor=caller.name)
    state.coordinator.wake()
    shown = msgspec.structs.replace(requested, host=state.host_name(host))
    return reply(shown, HTTPStatus.ACCEPTED)


async def create(
    requested: JobRequest, state: AppState, uid: JobUid, key: IdempotencyKey | None, actor: str
) -> Job:
    """Return the new job, or the one that the first request with `key` created.

    Raises what `Submitter.prepare` and `Jobs.create` do.
    """
    copy = state.data_dir.snapshot(uid)
    with ExitStack() as unless_stored:
        unless_stored.callback(shutil.rmtree, copy, ignore_errors=True)
        try:
            submission = await run_sync(state.submitter.prepare, requested, copy)
        except MusterError:
            # The job of the first request may be the obstacle, or its files may be gone.
            if key and (job := await run_sync(state.answers.find, key)):
                return job
            raise
        new = NewJob(
            job_id=submission.job_id,
            uid=uid,
            spec=submission.spec,
            message=submission.message,
            idempotency=key,
            actor=actor,
        )
        job = await state.submission_queue.store(new)
        if job.uid == uid:  # else the job of the first request
            unless_stored.pop_all()
        return job


def planned(requested: JobRequest, state: AppState) -> JobPlan:
    """Return what `create` would store, and store nothing. Raises what it does."""
    submission = state.submitter.prepare(requested)
    if requested.job_id is not None and state.jobs.find(submission.job_id) is not None:
        raise JobExists(submission.job_id)
    spec = submission.spec
    found = submission.shards
    per_rank = None if found is None else _shards_per_rank(spec, found)
    submitter = state.submitter
    request = planned_request(
        submission.job_id, spec, submitter.settings, submitter.cluster, module_command
    )
    return JobPlan(
        job_id=submission.job_id,
        message=submission.message,
        launcher=request.engine,
        request=request,
        world_size=spec.world_size,
        command=None if spec.command is None else list(spec.command),
        program=spec.program,
        shards=None if per_rank is None else sum(per_rank),
        shards_per_rank=per_rank,
        spec=msgspec.to_builtins(spec),
    )


def _shards_per_rank(spec: JobSpec, found: int) -> list[int]:
    if spec.mode == "synchronous":
        return [stop - start for start, stop in ranges(spec.virtual_shards, spec.world_size)]
    readings = [Reading(rank=rank, world_size=spec.world_size) for rank in range(spec.world_size)]
    return [len(reading.shard_idxs(found)) for reading in readings]
