"""The pool of a job as people see it. Pure: rows in, views out."""

from collections.abc import Collection, Sequence
from datetime import datetime

from api.pool_schemas import AgentState, MemberList, MemberView
from api.summary import age_seconds, every_rank, state
from muster.contracts.pool import WorkerState
from store.records import Job, Member, Worker


def member_list(
    job: Job,
    members: Sequence[Member],
    leaving: Collection[int],
    started: Sequence[Worker],
    now: datetime,
    agent: AgentState | None,
) -> MemberList:
    """Return everybody who is or was in the pool; for an independent job, its ranks.

    `agent` is what is known of the process that looks after them.
    """
    if job.spec.mode == "independent":
        workers = [_rank_view(worker, now) for worker in every_rank(started, job.world_size)]
    else:
        process = {(worker.rank, worker.incarnation): worker for worker in started}
        workers = [
            _member_view(
                one, one.worker_id in leaving, process.get((one.rank, one.incarnation)), now
            )
            for one in members
        ]
    return MemberList(job_id=job.job_id, world_size=job.world_size, agent=agent, workers=workers)


def _member_view(
    member: Member,
    asked_to_leave: bool,  # noqa: FBT001  a fact, no switch
    worker: Worker | None,
    now: datetime,
) -> MemberView:
    process = worker.process if worker else None
    # A member's own row is written when it moves; its process's, with every few beats.
    heard_at = worker.last_heartbeat_at if worker else member.last_heartbeat_at
    # A request to leave counts from the moment it was accepted.
    is_draining = asked_to_leave and member.state == WorkerState.ACTIVE
    return MemberView(
        worker_id=str(member.worker_id),
        rank=member.rank,
        state=WorkerState.DRAINING if is_draining else member.state,
        pid=process.pid if process else None,
        node=member.node,
        gpu_count=member.gpu_count,
        backend=member.backend,
        joined_at=member.joined_at,
        joined_step=member.joined_step,
        last_heartbeat_age_seconds=age_seconds(heard_at, now),
        step=worker.step if worker else None,
    )


def _rank_view(worker: Worker, now: datetime) -> MemberView:
    process = worker.process
    return MemberView(
        worker_id=worker.worker_id,
        rank=worker.rank,
        state=state(worker),
        pid=process.pid if process else None,
        node=process.node if process else None,
        gpu_count=0,
        backend=None,
        joined_at=None,
        joined_step=None,
        last_heartbeat_age_seconds=age_seconds(worker.last_heartbeat_at, now),
        step=worker.step,
    )
