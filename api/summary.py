"""The arithmetic of a summary: a job and its ranks in, totals out. Pure, so that it is a table.

A number that is not known is None (or 0 where a sum of nothing is meant), never NaN.
"""

import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from api.schemas import SummaryView, WorkerView
from api.views import heading
from muster.contracts.endings import RetryClass
from muster.contracts.rank import ProcessState
from store.records import Job, Worker

WAITING: Final = "waiting"
"""The state of a rank that has had no process yet."""

FINISHED: Final = "finished"
"""The state of a rank that has nothing left to do."""

_KINDS: Final = tuple(kind.value for kind in RetryClass)

_ALIVE: Final = frozenset({ProcessState.SPAWNED, ProcessState.LIVE, ProcessState.SUSPECT})


def summary(job: Job, started: Sequence[Worker], now: datetime) -> SummaryView:
    """Return the row of `job`; ranks that are not among the `started` ones are waiting."""
    workers = every_rank(started, job.world_size)
    counted = workers if job.spec.mode == "independent" else [spokesman(workers)]
    return SummaryView(
        **heading(job),
        step=sum(worker.step for worker in counted),
        total_steps=total_steps(counted),
        throughput_steps_per_sec=sum(throughput(worker) for worker in counted),
        eta_seconds=None if job.is_terminal else eta_seconds(counted),
        loss=mean_loss(counted),
        checkpoints_saved=sum(worker.checkpoints_saved for worker in workers),
        last_checkpoint_step=last_checkpoint_step(workers),
        restarts=sum(worker.restarts for worker in workers),
        endings=endings(started),
        workers=[worker_view(worker, now) for worker in workers],
    )


def every_rank(started: Sequence[Worker], world_size: int) -> list[Worker]:
    """Return one worker per rank, in their order, with a waiting one where none was started."""
    known = {worker.rank: worker for worker in started}
    return [known.get(rank) or _waiting(rank) for rank in range(world_size)]


def spokesman(workers: Sequence[Worker]) -> Worker:
    """Return the rank that stands for all where they train one model: the furthest living one."""
    return max(workers, key=lambda worker: (worker.state in _ALIVE, worker.step))


def worker_view(worker: Worker, now: datetime) -> WorkerView:
    """Return one rank's row as of `now`."""
    process = worker.process
    return WorkerView(
        worker_id=worker.worker_id,
        rank=worker.rank,
        state=state(worker),
        pid=process.pid if process else None,
        node=process.node if process else None,
        step=worker.step,
        total_steps=worker.total_steps,
        epoch=worker.epoch,
        shard_idx=worker.shard_idx,
        line_idx=worker.line_idx,
        loss=_finite(worker.loss),
        metrics={name: value for name, value in worker.metrics.items() if math.isfinite(value)},
        throughput_steps_per_sec=throughput(worker),
        checkpoints_saved=worker.checkpoints_saved,
        last_checkpoint_step=worker.last_checkpoint_step,
        restarts=worker.restarts,
        endings=worker.endings,
        last_heartbeat_age_seconds=age_seconds(worker.last_heartbeat_at, now),
        exit_code=worker.exit_code,
        exit_signal=worker.exit_signal,
    )


def state(worker: Worker) -> str:
    """Return the state of the rank's process, or "finished" or "waiting" if it has none."""
    if worker.finished:
        return FINISHED
    # No incarnation was ever started: nothing has exited.
    return WAITING if worker.incarnation < 0 else worker.state


def throughput(worker: Worker) -> float:
    """Return the steps per second of a rank that lives; 0 for one that does not."""
    if worker.finished or worker.state not in _ALIVE:
        return 0.0
    return _finite(worker.throughput_steps_per_sec) or 0.0


def endings(workers: Sequence[Worker]) -> dict[str, int]:
    """Return how many processes of these ranks ended in each way, those that none did included."""
    counted = Counter[str]()
    for worker in workers:
        counted.update(worker.endings)
    return {kind: counted[kind] for kind in _KINDS}


def total_steps(workers: Sequence[Worker]) -> int | None:
    """Return the steps of all ranks, or None while one of them has not said how many it has."""
    totals = [worker.total_steps for worker in workers]
    known = [total for total in totals if total is not None]
    return sum(known) if len(known) == len(totals) else None


def eta_seconds(workers: Sequence[Worker]) -> float | None:
    """Return the time until the slowest rank is done, or None while any rank's is not known."""
    slowest = 0.0
    for worker in workers:
        if worker.finished:
            continue
        rate = throughput(worker)
        if worker.total_steps is None or rate <= 0:
            return None
        slowest = max(slowest, max(worker.total_steps - worker.step, 0) / rate)
    return slowest


def mean_loss(workers: Sequence[Worker]) -> float | None:
    """Return the mean of the last losses, or None if no rank has one."""
    losses = [loss for worker in workers if (loss := _finite(worker.loss)) is not None]
    return math.fsum(losses) / len(losses) if losses else None


def last_checkpoint_step(workers: Sequence[Worker]) -> int | None:
    """Return the newest checkpoint of any rank, or None if no rank has one."""
    steps = [step for worker in workers if (step := worker.last_checkpoint_step) is not None]
    return max(steps, default=None)


def age_seconds(moment: datetime | None, now: datetime) -> float | None:
    """Return how long ago `moment` was, or None for never."""
    # A clock that was set back would give a negative age.
    return max((now - moment).total_seconds(), 0.0) if moment else None


def _waiting(rank: int) -> Worker:
    return Worker(rank=rank, incarnation=-1, state=WAITING, process=None)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
