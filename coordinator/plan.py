"""What is to be done about a job now. `plan` is pure: snapshot and time in, actions out.

The rules are asked in order. Each looks at one concern and answers with actions or with nothing;
what a rule wants done again is wanted again at the next look, until the world agrees.
"""

from collections.abc import Callable, Iterator
from itertools import chain, islice

from coordinator.actions import (
    Action,
    DismissAgent,
    KillAgent,
    KillProcess,
    Move,
    Start,
    StartAgent,
    Terminate,
)
from coordinator.gang_plan import gang_starts, moments_of_gang, who_is_left_of_a_gang_ends
from coordinator.pool_plan import (
    layout_fits_the_pool,
    layout_moments,
    may_go,
    newcomers_limit,
    pool_has_its_size,
    status_of_pool,
    who_differs_is_stopped,
    who_is_out_of_service_goes,
)
from coordinator.silence import (
    NEVER_AGAIN,
    agent_deadline,
    moments_of_silence,
    silent_ranks,
)
from coordinator.snapshot import AgentState, Cause, JobSnapshot, RankSnapshot
from coordinator.wording import describe_recovery, describe_stop
from muster.contracts.job import TERMINAL, JobStatus, Reason

PARTING_SECONDS = 2.0
"""Ranks part at the same moment, and then each has only to exit. One that heard of a new layout in
that very moment waits for peers that are gone, and has to be told."""


def plan(snapshot: JobSnapshot, now: float) -> list[Action]:
    """Return everything that should be done for this job at `now` (monotonic seconds).

    A job in the queue is left there: letting it in is a decision about all jobs (`admission`).
    """
    if snapshot.status in TERMINAL or (snapshot.status is JobStatus.QUEUED and not snapshot.stop):
        return []
    return list(chain.from_iterable(rule(snapshot, now) for rule in _RULES))


def wake_at(snapshot: JobSnapshot, now: float) -> float:
    """Return when `plan` has to be asked again even if nothing happens; infinity for never."""
    return min((moment for moment in _moments(snapshot) if moment > now), default=NEVER_AGAIN)


def _agent_is_there(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    if snapshot.agent is AgentState.ABSENT:
        if snapshot.needs_agent and now >= snapshot.agent_start_at:
            yield StartAgent()
    elif snapshot.needs_agent and now >= agent_deadline(snapshot):
        yield KillAgent()


def _silent_ranks_are_killed(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    if not _patience_is_over(snapshot, now):  # else all of them are ended, for another reason
        yield from silent_ranks(snapshot, now)


def _ranks_are_ended(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """A forced stop ends ranks at once; any other end of a job asks them, and waits its grace."""
    if not snapshot.is_ending:
        return
    kill = _patience_is_over(snapshot, now)
    for rank in snapshot.ranks:
        if not rank.is_alive or rank.kill is not None:
            continue
        if kill:
            yield KillProcess(rank=rank.rank, cause=_end_of_job(snapshot))
        elif not (rank.terminated or _is_parting(snapshot, rank, now)) and may_go(snapshot, rank):
            yield Terminate(rank=rank.rank)


def _is_parting(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> bool:
    """Whether a rank took part in a job that is done, and may be about to exit by itself."""
    is_early = now < snapshot.stop_at + PARTING_SECONDS
    return snapshot.done and rank.took_up >= 0 and is_early


def _patience_is_over(snapshot: JobSnapshot, now: float) -> bool:
    out_of_grace = now >= snapshot.stop_at + snapshot.stop_grace_seconds
    return snapshot.is_ending and (snapshot.ends_at_once or out_of_grace)


def _end_of_job(snapshot: JobSnapshot) -> Cause:
    reason = Reason.INTERRUPTED if snapshot.interrupting else Reason.STOPPED_BY_USER
    if snapshot.verdict is not None:
        reason = snapshot.verdict.reason
    return Cause(reason=reason, message="did not end within the grace period and was killed")


def _ranks_are_started(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    if snapshot.is_ending or snapshot.is_gang or snapshot.agent is not AgentState.CONNECTED:
        return
    due = (rank for rank in snapshot.ranks if rank.is_down and now >= rank.start_at)
    yield from (Start(rank=rank.rank) for rank in islice(due, newcomers_limit(snapshot)))


def _job_ends(snapshot: JobSnapshot, _now: float) -> Iterator[Action]:
    """A job is over once nobody makes files of it any more: those may be removed from then on.

    One that is connected has made its own, and goes when it is told to. Any other may be about to.
    """
    move = _last_move(snapshot)
    if move is None:
        return
    if snapshot.agent in {AgentState.ABSENT, AgentState.CONNECTED}:
        yield move
    if snapshot.has_agent:
        yield DismissAgent()


def _last_move(snapshot: JobSnapshot) -> Move | None:
    """Return how a job ends once it is without processes; None if it does not."""
    if snapshot.any_alive:
        return None
    if snapshot.all_finished:
        return Move(status=JobStatus.COMPLETED, message=snapshot.note)
    if snapshot.verdict is not None:
        verdict = snapshot.verdict
        return Move(status=JobStatus.FAILED, reason=verdict.reason, message=verdict.message)
    if snapshot.stop is not None and snapshot.status in {JobStatus.STOPPING, JobStatus.QUEUED}:
        return Move(
            status=JobStatus.STOPPED,
            reason=Reason.STOPPED_BY_USER,
            message=describe_stop(snapshot),
        )
    if snapshot.interrupting and snapshot.status is JobStatus.STOPPING:
        return Move(
            status=JobStatus.QUEUED,
            reason=Reason.INTERRUPTED,
            message="the service was shut down; the job goes on at the next start",
        )
    return None


def _status_tells_the_truth(snapshot: JobSnapshot, _now: float) -> Iterator[Action]:
    """The status follows from the ranks; a move is planned when it says something else."""
    if _last_move(snapshot) is not None:
        return
    ending = _status_of_an_ending_job(snapshot)
    wanted = _status_of_a_going_job(snapshot) if ending is None else ending
    if wanted != _stay(snapshot):
        yield wanted


def _status_of_an_ending_job(snapshot: JobSnapshot) -> Move | None:
    verdict = snapshot.verdict
    if snapshot.stop is None and not snapshot.interrupting and verdict is None:
        return None
    if snapshot.status is JobStatus.QUEUED:
        return _stay(snapshot)  # nothing of it runs: there is no STOPPING to go through
    if verdict is not None:
        # Durable with it, so that a successor does not start again what has failed for good.
        return Move(status=JobStatus.STOPPING, reason=verdict.reason, message=verdict.message)
    if snapshot.stop is not None:
        return Move(
            status=JobStatus.STOPPING,
            reason=Reason.STOPPED_BY_USER,
            message="asked to stop; ranks are saving and exiting",
        )
    return Move(
        status=JobStatus.STOPPING,
        reason=Reason.INTERRUPTED,
        message="the service is shutting down; ranks are saving and exiting",
    )


def _status_of_a_going_job(snapshot: JobSnapshot) -> Move:
    of_pool = status_of_pool(snapshot)
    if of_pool is not None:
        return of_pool
    for rank in snapshot.in_service:
        if rank.trouble is not None:
            return _recovering(snapshot, rank, rank.trouble)
    if all(_is_at_work(snapshot, rank) for rank in snapshot.in_service):
        return Move(status=JobStatus.RUNNING, message=snapshot.note)
    if snapshot.status is JobStatus.STARTING:
        return Move(status=JobStatus.STARTING, message=snapshot.note)
    return _stay(snapshot)  # what was in trouble is back, but others have not spoken yet


def _is_at_work(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """Whether a rank is well, and where ranks train together has joined the others."""
    return rank.is_well and (rank.took_up >= 0 or not snapshot.is_synchronous)


def _stay(snapshot: JobSnapshot) -> Move:
    return Move(status=snapshot.status, reason=snapshot.reason, message=snapshot.message)


def _recovering(snapshot: JobSnapshot, rank: RankSnapshot, cause: Cause) -> Move:
    return Move(
        status=JobStatus.RECOVERING,
        reason=cause.reason,
        message=describe_recovery(snapshot, rank, cause),
    )


def _moments(snapshot: JobSnapshot) -> Iterator[float]:
    if snapshot.agent is AgentState.ABSENT:
        yield snapshot.agent_start_at
    else:
        yield agent_deadline(snapshot)
    yield from layout_moments(snapshot)
    yield from moments_of_gang(snapshot)
    if snapshot.is_ending:
        yield snapshot.stop_at + snapshot.stop_grace_seconds
        yield snapshot.stop_at + PARTING_SECONDS
    for rank in snapshot.ranks:
        yield from _moments_of_rank(snapshot, rank)


def _moments_of_rank(snapshot: JobSnapshot, rank: RankSnapshot) -> Iterator[float]:
    if rank.is_down:
        yield rank.start_at
    elif rank.is_alive:
        yield from moments_of_silence(snapshot, rank)


_RULES: tuple[Callable[[JobSnapshot, float], Iterator[Action]], ...] = (
    _silent_ranks_are_killed,
    _ranks_are_ended,
    _job_ends,
    _status_tells_the_truth,
    pool_has_its_size,
    who_is_out_of_service_goes,
    who_differs_is_stopped,
    who_is_left_of_a_gang_ends,
    _agent_is_there,
    _ranks_are_started,
    gang_starts,
    layout_fits_the_pool,
)
