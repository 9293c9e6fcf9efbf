"""The pool of a job: show it, scale it, add and remove a worker, pause and resume, save."""

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Response

from api.dependencies import READ, SUBMIT, AppState, CurrentCaller, State
from api.errors import Conflict, Problem, invalid_field
from api.listing import IfMatch, required_version
from api.schema import JobPatch, JoinRequest, KnownJobId, KnownWorkerId, body, operation, reply
from api.views import job_tag, job_view, member_list
from database.errors import JobOver
from database.records import Job
from muster.cluster.description import Cluster
from muster.cluster.placement import RankRequest, place, use_of
from muster.contracts.errors import InvalidDescription
from muster.contracts.job.status import JobId, JobStatus
from muster.contracts.views.job import JobView, MemberList

_CAN_SAVE: Final = frozenset({JobStatus.RUNNING, JobStatus.RECOVERING, JobStatus.PAUSED})

router = APIRouter(tags=["jobs"])


@router.patch(
    "/jobs/{job_id}",
    **operation("Scale a job that trains synchronously", SUBMIT, JobView, 404, 409, 412),
)
def scale_job(
    job_id: KnownJobId,
    state: State,
    caller: CurrentCaller,
    requested: Annotated[JobPatch, body(JobPatch)],
    if_match: IfMatch = None,
) -> Response:
    """Ask for another number of ranks: training pauses between two steps and goes on with them.

    The weights are the same as if the job had always had that number. With `If-Match` a job that
    has changed since you looked is left alone.
    """
    seen = state.jobs.get(job_id)
    version = required_version(seen, if_match)
    _refuse_independent(
        seen,
        "keeps-its-world-size",
        f"its ranks read shards by rank number, so it keeps its world size of {seen.world_size}. "
        "Only a job of mode synchronous can be scaled.",
    )
    low, high = seen.spec.min_workers, seen.spec.largest_world_size
    if not low <= requested.world_size <= high:
        raise invalid_field(
            "body",
            "world_size",
            f"this job takes {low} to {high} ranks: its min_workers and its max_workers",
        )
    job = state.jobs.scale(job_id, requested.world_size, version, actor=caller.name)
    state.coordinator.wake()
    return reply(job_view(job), headers={"ETag": job_tag(job)})


@router.post(
    "/jobs/{job_id}/pause",
    **operation("Pause a job that trains synchronously", SUBMIT, JobView, 404, 409),
)
def pause_job(job_id: KnownJobId, state: State, caller: CurrentCaller) -> Response:
    """Stop training after the present step; the ranks stay. Repeating it changes nothing."""
    return _set_pause(state, job_id, caller.name, paused=True)


@router.post("/jobs/{job_id}/resume", **operation("Resume a paused job", SUBMIT, JobView, 404, 409))
def resume_job(job_id: KnownJobId, state: State, caller: CurrentCaller) -> Response:
    """End a requested pause. A job that is not paused stays as it is."""
    return _set_pause(state, job_id, caller.name, paused=False)


@router.post(
    "/jobs/{job_id}/checkpoint",
    **operation("Save a checkpoint now", SUBMIT, JobView, 404, 409),
)
def request_checkpoint(job_id: KnownJobId, state: State, caller: CurrentCaller) -> Response:
    """Save at the next step boundary, when every worker is ready; training then goes on.

    It is durable once `checkpoint_requested` is false; the event `checkpoint_saved` names its step.
    """
    seen = state.jobs.get(job_id)
    _refuse_over(seen)
    why = f"each of its ranks decides itself when it saves. Stop it (POST /jobs/{job_id}/stop) "
    _refuse_independent(seen, "not-synchronous", f"{why}for a last checkpoint.")
    if seen.status not in _CAN_SAVE:
        raise Conflict(
            "not-running", f"{job_id} is {seen.status_shown}: wait until it runs, and ask again."
        )
    job = state.jobs.request_checkpoint(job_id, actor=caller.name)
    state.coordinator.wake()
    return reply(job_view(job))


@router.get(
    "/jobs/{job_id}/workers",
    **operation("Present and former workers of a job", READ, MemberList, 404),
)
def list_workers(job_id: KnownJobId, state: State) -> Response:
    job = state.jobs.get(job_id)
    workers = state.history.workers(job_id)
    members = state.history.members_by_job([job_id])[job_id]
    agents = state.history.agents_by_job([job_id])[job_id]
    return reply(member_list(job, members, workers, agents, state.host_name, state.clock()))


@router.post(
    "/jobs/{job_id}/workers",
    **operation(
        "Ask to join a job that trains synchronously",
        SUBMIT,
        JobView,
        *(404, 409, 412),
        status=HTTPStatus.ACCEPTED,
    ),
)
def request_join(
    job_id: KnownJobId,
    state: State,
    caller: CurrentCaller,
    asking: Annotated[JoinRequest, body(JoinRequest)],
    if_match: IfMatch = None,
) -> Response:
    """Add a rank on a machine of the cluster file: it starts there, and joins between two steps.

    With `If-Match` a request that is repeated for want of an answer adds no second rank.
    """
    seen, host = state.jobs.get(job_id), state.host_named(asking.node)
    version = required_version(seen, if_match)
    _refuse_over(seen)
    _refuse_independent(
        seen,
        "keeps-its-world-size",
        "its ranks read shards by rank number, so none can join. Only a job of mode synchronous "
        "takes new workers.",
    )
    _refuse_without_room(state, seen, asking, host)
    offer = f"{asking.backend}, GPUs: {asking.gpu_count}, epoch: {asking.epoch}"
    text = f"{asking.node} asked to join ({offer})"
    job = state.history.request_join(job_id, host, text, version, actor=caller.name)
    state.coordinator.wake()
    return reply(job_view(job), HTTPStatus.ACCEPTED, {"ETag": job_tag(job)})


def _refuse_without_room(state: AppState, job: Job, asking: JoinRequest, host: str) -> None:
    """Refuse a machine that is not in the cluster file, or where the rank could not start now."""
    cluster, spec = state.submitter.cluster, job.spec
    if not cluster.is_described:
        detail = "This service has no cluster: set MUSTER_CLUSTER for it, see docs/cluster.md."
        raise Problem(HTTPStatus.NOT_FOUND, "node-not-found", detail)
    try:
        node = cluster.node(host)
    except InvalidDescription as error:
        raise Problem(HTTPStatus.NOT_FOUND, "node-not-found", f"{error}.") from error
    offered = asking.gpu_count if asking.backend == "cuda" else 0
    if offered < spec.gpu_count:
        raise Conflict(
            "node-unsuitable",
            f"{node.name} offers {offered} GPUs for CUDA, and a rank of {job.job_id} needs "
            f"{spec.gpu_count}: join with another machine, or another job.",
        )
    unfinished = state.jobs.unfinished()
    ranks = state.history.ranks_on_hosts([job.job_id for job in unfinished])
    placed = [
        (RankRequest(job.job_id, job.spec), node.name)
        for job in unfinished
        for _ in range(job.expected_on(node.name, ranks[job.job_id]))
    ]
    alone = Cluster(nodes=(node,))
    (placement,) = place(alone, [RankRequest(job.job_id, spec)], use_of(alone, placed))
    if placement.chosen is None:
        raise Conflict(
            "node-unsuitable", f"{node.name} cannot run another rank of {job.job_id} ({placement})."
        )


@router.post(
    "/jobs/{job_id}/workers/{worker_id}/leave",
    **operation("Ask an active worker to leave", SUBMIT, JobView, 404, 409),
)
def dismiss_worker(
    job_id: KnownJobId, worker_id: KnownWorkerId, state: State, caller: CurrentCaller
) -> Response:
    """Remove a worker at the next step boundary. The job has one rank less from then on."""
    _refuse_independent(
        state.jobs.get(job_id),
        "keeps-its-world-size",
        "no other rank would read the shards of a rank that leaves. Only workers of a job of mode "
        "synchronous can leave.",
    )
    job = state.history.request_departure(job_id, worker_id, actor=caller.name)
    state.coordinator.wake()
    return reply(job_view(job))


def _set_pause(state: AppState, job_id: JobId, actor: str, *, paused: bool) -> Response:
    seen = state.jobs.get(job_id)
    _refuse_over(seen)
    why = f"its ranks share no step at which to pause. Stop it (POST /jobs/{job_id}/stop) "
    _refuse_independent(seen, "never-pauses", f"{why}and continue later with resume_from.")
    job = state.jobs.set_pause(job_id, paused=paused, actor=actor)
    state.coordinator.wake()
    return reply(job_view(job))


def _refuse_over(job: Job) -> None:
    if job.is_terminal:
        raise JobOver(job.job_id, job.status)


def _refuse_independent(job: Job, slug: str, why: str) -> None:
    if job.spec.mode == "independent":
        raise Conflict(slug, f"{job.job_id} is independent: {why}")
