"""From rows to response bodies. Pure.

An unknown number is None (or 0 for an empty sum), never NaN.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from itertools import count, groupby, islice
from operator import attrgetter
from typing import Any, Final

import msgspec

from api.access.auth import Caller
from database.records import AgentRecord, Audit, Job, MemberRecord, RankRecord, WorkerRecord
from muster.contracts.agent import is_node_id
from muster.contracts.job.field_types import BitsPromised
from muster.contracts.job.retry import RetryClass
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import OPEN, JobStatus
from muster.contracts.pool import WorkerState
from muster.contracts.rank import ProcessState
from muster.contracts.series import Point, are_live, compact
from muster.contracts.token import Scope, Token
from muster.contracts.views.history import (
    AuditView,
    CheckpointView,
    EpochView,
    SeriesColumns,
    SeriesList,
    SeriesView,
)
from muster.contracts.views.job import (
    FINISHED,
    WAITING,
    AgentView,
    JobView,
    MemberList,
    MemberView,
    SummaryView,
    WorkerView,
)
from muster.contracts.views.service import TokenView
from muster.contracts.views.view import View

HIDDEN: Final = "…"
"""Replaces a value that this caller may not see."""

ETA_LIMIT_SECONDS: Final = 365 * 24 * 3600.0

_HAS_POOL: Final = OPEN - {JobStatus.QUEUED, JobStatus.STOPPING}

_ALIVE: Final = frozenset({ProcessState.SPAWNED, ProcessState.LIVE, ProcessState.SUSPECT})


def job_view(job: Job, caller: Caller | None = None) -> JobView:
    """Return the view of a job for `caller`; None: for a caller that may change it.

    People put keys into `env` in spite of all, so a caller that may not submit jobs sees only the
    names there.
    """
    spec = msgspec.to_builtins(job.spec)
    if caller is not None and not caller.scope.covers(Scope.SUBMIT):
        spec["env"] = dict.fromkeys(spec["env"], HIDDEN)
    return JobView(
        **_heading(JobView, job),
        job_uid=job.uid,
        stop_requested=job.stop_request is not None,
        pause_requested=job.pause_request,
        checkpoint_requested=job.is_checkpoint_pending,
        spec=spec,
    )


def job_tag(job: Job) -> str:
    """Return the strong entity tag of a job: the version of its row."""
    return f'"{job.uid}.{job.version}"'


def _heading(view: type[View], job: Job) -> dict[str, Any]:
    return _same(view, job, but={"spec"}) | {"name": job.spec.name, "status": job.status_shown}


def _same(view: type[View], row: object, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a view that `row` has under the same name."""
    names = (name for name in view.__struct_fields__ if name not in but and hasattr(row, name))
    return {name: getattr(row, name) for name in names}


def summary(job: Job, started: Sequence[WorkerRecord], now: datetime) -> SummaryView:
    """Return the progress of `job`; ranks missing in `started` are waiting."""
    workers = every_rank(started, job.world_size)
    counted = workers if job.spec.mode == "independent" else [_furthest(workers)]
    stepping = [_furthest(workers)] if _is_one_model(job.spec, workers) else workers
    steps = (one.progress.last_checkpoint_step for one in workers)
    endings = Counter[str]()
    for worker in started:
        endings.update(worker.endings)
    return SummaryView(
        **_heading(SummaryView, job),
        step=sum(worker.progress.step for worker in stepping),
        total_steps=total_steps(stepping),
        throughput_steps_per_sec=sum(throughput(worker) for worker in stepping),
        eta_seconds=None if job.is_terminal else eta_seconds(counted),
        loss=mean_loss(counted),
        bits=_bits(job.spec, workers),
        checkpoints_saved=sum(worker.checkpoints_saved for worker in workers),
        last_checkpoint_step=max((step for step in steps if step is not None), default=None),
        restarts=sum(worker.restarts for worker in workers),
        endings={kind.value: endings[kind.value] for kind in RetryClass},
        workers=[_worker_view(job.spec, worker, now) for worker in workers],
    )


def every_rank(started: Sequence[WorkerRecord], world_size: int) -> list[WorkerRecord]:
    """Return one worker per rank, in order, with a waiting one for each that never started.

    After scaling down, the numbers of the ranks may have gaps.
    """
    known = {worker.rank: worker for worker in started if worker.in_service}
    vacant = (rank for rank in count() if rank not in known)
    for rank in islice(vacant, max(0, world_size - len(known))):
        known[rank] = WorkerRecord(rank=rank, attempt=-1, state=WAITING, process=None)
    return [worker for _, worker in sorted(known.items())][:world_size]


def _is_one_model(spec: JobSpec, workers: Sequence[RankRecord]) -> bool:
    """True if a step of one rank is a step of all; for a command, if all have as many to do."""
    totals = {worker.progress.total_steps for worker in workers}
    is_alike = spec.command is not None and len(totals) == 1
    return spec.mode == "synchronous" or spec.restart_scope == "gang" or is_alike


def _furthest(workers: Sequence[RankRecord]) -> RankRecord:
    """Return the living rank with the most steps: where all train one model it counts for all."""
    return max(workers, key=lambda worker: (worker.state in _ALIVE, worker.progress.step))


def _worker_view(spec: JobSpec, worker: WorkerRecord, now: datetime) -> WorkerView:
    return WorkerView(
        **_same(WorkerView, worker)
        | _same(WorkerView, worker.progress)
        | _place(spec, worker)
        | _process(worker, now)
        | {"throughput_steps_per_sec": throughput(worker)}
    )


def _place(spec: JobSpec, worker: WorkerRecord) -> dict[str, Any]:
    """Return what a view says of a rank's worker in the pool."""
    if spec.mode == "independent":
        return {"worker_id": str(worker.rank), "state": _state(worker)}
    member = worker.member
    return {
        "worker_id": str(member.worker_id) if member else None,
        "state": member.state if member else None,
    }


def _process(worker: RankRecord, now: datetime) -> dict[str, Any]:
    """Return what a view says of a rank's process."""
    process, host = worker.process, worker.host
    return {
        "attempt": None if worker.attempt < 0 else worker.attempt,
        "process": _state(worker),
        "pid": process.pid if process else None,
        # The machine's name says more than its id.
        "node": process and (process.node if is_node_id(host) else host),
        "last_heartbeat_age_seconds": _age_seconds(worker.last_heartbeat_at, now),
    }


def _state(worker: RankRecord) -> str:
    if worker.finished and worker.state != ProcessState.EXITING:
        return FINISHED
    return WAITING if worker.attempt < 0 else worker.state


def throughput(worker: RankRecord) -> float:
    """Return the steps per second of a living rank, otherwise 0."""
    if worker.finished or worker.state not in _ALIVE:
        return 0.0
    return worker.throughput_steps_per_sec


def total_steps(workers: Sequence[RankRecord]) -> int | None:
    """Return the sum over the ranks, or None while that of a rank is unknown."""
    known = [total for one in workers if (total := one.progress.total_steps) is not None]
    return sum(known) if len(known) == len(workers) else None


def eta_seconds(workers: Sequence[RankRecord]) -> float | None:
    """Return the time until the slowest rank is done.

    None while that of a rank is unknown, or over a year: then training hardly moves at the moment.
    """
    slowest = 0.0
    for worker in workers:
        if worker.finished:
            continue
        rate, progress = throughput(worker), worker.progress
        if progress.total_steps is None or rate <= 0:
            return None
        slowest = max(slowest, max(progress.total_steps - progress.step, 0) / rate)
    return slowest if slowest < ETA_LIMIT_SECONDS else None


def mean_loss(workers: Sequence[RankRecord]) -> float | None:
    """Return the mean of the last losses, or None if no rank has one."""
    losses = [loss for worker in workers if (loss := worker.progress.loss) is not None]
    return math.fsum(losses) / len(losses) if losses else None


def _bits(spec: JobSpec, workers: Sequence[RankRecord]) -> BitsPromised:
    is_unchecked = any(worker.progress.is_unchecked for worker in workers)
    return "unchecked" if is_unchecked and spec.bits == "same" else spec.bits


def _age_seconds(moment: datetime | None, now: datetime) -> float | None:
    # The clock may have been set back, which would give a negative age.
    return max((now - moment).total_seconds(), 0.0) if moment else None


def member_list(
    job: Job,
    members: Sequence[MemberRecord],
    started: Sequence[WorkerRecord],
    agents: Sequence[AgentRecord],
    host_name: Callable[[str], str],
    now: datetime,
) -> MemberList:
    """Return every present and former worker of the pool; of an independent job, its ranks.

    `host_name` returns what people call a host.
    """
    if job.spec.mode == "independent":
        ranks = every_rank(started, job.world_size)
        workers = [_rank_view(job.spec, worker, now) for worker in ranks]
        active, is_changing = sum(worker.pid is not None for worker in workers), False
    else:
        attempts = {(worker.rank, worker.attempt): worker for worker in started}
        workers = [_member_view(one, attempts.get((one.rank, one.attempt)), now) for one in members]
        states = Counter(worker.state for worker in workers)
        active = states[WorkerState.ACTIVE]
        is_moving = bool(states[WorkerState.SYNCING] or states[WorkerState.DRAINING])
        is_changing = job.status in _HAS_POOL and (is_moving or active != job.world_size)
    return MemberList(
        job_id=job.job_id,
        world_size=job.world_size,
        active=active,
        is_changing=is_changing,
        agents=[AgentView(host=host_name(agent.host), state=agent.state) for agent in agents],
        workers=workers,
    )


def _member_view(member: MemberRecord, worker: RankRecord | None, now: datetime) -> MemberView:
    # The row of a member changes when it moves; that of its process, with every few heartbeats.
    own = _process(worker, now) if worker else {"process": None, "pid": None}
    age = {"last_heartbeat_age_seconds": _age_seconds(member.last_heartbeat_at, now)}
    step = worker.progress.step if worker else None
    named = _same(MemberView, member) | {"worker_id": str(member.worker_id), "step": step}
    return MemberView(**age | own | named)


def _rank_view(spec: JobSpec, worker: WorkerRecord, now: datetime) -> MemberView:
    return MemberView(
        rank=worker.rank,
        **_place(spec, worker),
        **_process(worker, now),
        gpu_count=spec.gpu_count,
        backend=spec.device_type,
        joined_at=None,
        joined_step=None,
        step=worker.progress.step,
    )


def audit_view(job: Job, audit: Audit, started: Sequence[RankRecord] = ()) -> AuditView:
    """Return what is proved so far; nothing is ever proved for an independent job."""
    is_complete = job.spec.mode == "synchronous" and job.status is JobStatus.COMPLETED
    is_exact: bool | None = None
    if audit.inexact:
        is_exact = False
    elif is_complete:
        # Samples of a missing epoch, or of one that is short at the end, were never read.
        is_exact = audit.exact >= job.spec.epochs
    return AuditView(
        job_id=job.job_id,
        complete=is_complete,
        exactly_once=is_exact,
        bits=_bits(job.spec, started),
        epochs=[
            EpochView(
                **_same(EpochView, epoch, but={"exactly_once"}),
                hash=f"{epoch.hash_sum:016x}",
                expected_hash=f"{epoch.expected_hash_sum:016x}",
                exactly_once=bool(epoch.exactly_once) if is_complete else epoch.exactly_once,
            )
            for epoch in audit.epochs
        ],
        epochs_omitted=audit.epochs_omitted,
        checkpoints=msgspec.convert(audit.commits, list[CheckpointView], from_attributes=True),
        checkpoints_omitted=audit.commits_omitted,
    )


def series_list(job: Job, names: Sequence[str], points: Sequence[Point], limit: int) -> SeriesList:
    """Return these points by name, at most about `limit` of each."""
    series = {}
    for name, own in groupby(points, attrgetter("name")):
        shown = compact(list(own), limit, limit)
        parts: dict[bool, list[Point]] = {True: [], False: []}
        for point, is_live in zip(shown, are_live(shown), strict=True):
            parts[is_live].append(point)
        live, abandoned = (_columns(parts[kind], job.created_at) for kind in (True, False))
        series[name] = SeriesView(live=live, abandoned=abandoned)
    return SeriesList(job_id=job.job_id, began_at=job.created_at, names=list(names), series=series)


def point_state(point: Point, began: datetime) -> dict[str, Any]:
    """Return a point as JSON, with the fields that `SeriesColumns` has."""
    seconds = round((point.at - began).total_seconds(), 3)
    return {**_same(SeriesColumns, point), "seconds": seconds}


def _columns(points: Sequence[Point], began: datetime) -> SeriesColumns:
    shown = [point_state(point, began) for point in points]
    names = SeriesColumns.__struct_fields__
    return SeriesColumns(**{name: [point[name] for point in shown] for name in names})


def token_view(token: Token, now: datetime) -> TokenView:
    """Return a token without its secret."""
    return TokenView(**_same(TokenView, token, but={"is_valid"}), is_valid=token.is_valid(now))
