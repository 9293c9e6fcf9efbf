"""What has to be done about a job now: `plan` is pure, snapshot and time in, actions out.

The rules run in order. Each is about one concern and yields actions or nothing. A rule repeats an
action in every plan until the snapshot agrees with it.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Final

from coordinator.decide import actions, liveness, plan_pool
from coordinator.decide.actions import Action, SetStatus
from coordinator.decide.events import (
    describe_export,
    describe_held,
    describe_late_agent,
    describe_recovery,
    describe_stop,
)
from coordinator.decide.state.job import AgentSnapshot, JobSnapshot
from coordinator.decide.state.job_end import EndKind
from coordinator.decide.state.rank import Cause, RankSnapshot
from coordinator.decide.state.request import RequestState
from muster.contracts.agent import AgentState
from muster.contracts.job.status import TERMINAL, JobStatus, Reason

EXIT_SECONDS: Final = 2.0
"""How long ranks of a finished synchronous job may take to report the last step.

They take it at the same moment. One that was just told of a new group round waits for peers that
are gone, and has to be asked to exit.
"""

DRAIN_SECONDS: Final = 10.0
"""How long the last lines of ranks on another host may take to come."""

PARTITION_LIMIT: Final = 2
"""Group rounds in a row in which the same two hosts cannot reach each other: one is given up."""

_STUBBORN: Final = Cause(
    reason=Reason.GANG_RESTARTED,
    message="did not end within the grace period after its gang had lost a rank, and was killed",
)


def plan(snapshot: JobSnapshot, now: float) -> list[Action]:
    """Return every action that is due for this job at `now` (monotonic seconds).

    Queued jobs get none: admission is a decision about all jobs (`coordinator.decide.placement`).
    """
    is_queued = snapshot.status is JobStatus.QUEUED and snapshot.end.stop is None
    if snapshot.status in TERMINAL or is_queued:
        return []
    lost = list(_lose_hosts(snapshot, now))
    # Nothing else is to be decided about ranks that are about to be given up.
    return lost or list(chain.from_iterable(rule(snapshot, now) for rule in _RULES))


def wake_at(snapshot: JobSnapshot, now: float) -> float:
    """Return when `plan` has to run again even if nothing happens; infinity for never."""
    return min(
        (moment for moment in _deadlines(snapshot) if moment > now), default=liveness.NEVER_DUE
    )


def _deadlines(snapshot: JobSnapshot) -> Iterator[float]:
    ranks = snapshot.ranks_by_host()
    for host, agent in snapshot.agents.items():
        if agent.state is AgentState.ABSENT:
            yield agent.start_at
        else:
            yield liveness.agent_deadline(snapshot, agent, ranks[host])
        yield liveness.host_deadline(snapshot, agent, ranks[host])
        yield agent.logs.since + DRAIN_SECONDS
    yield liveness.agent_late_at(snapshot)
    yield from plan_pool.group_deadlines(snapshot)
    for rank in snapshot.ranks:
        if rank.is_down:
            yield rank.budget.start_at
        elif rank.is_alive:
            yield from liveness.silence_deadlines(snapshot, rank)
            if snapshot.is_ending:
                yield _terminate_at(snapshot, rank)
                yield _kill_at(snapshot, rank)
            if snapshot.is_gang_broken and rank.attempt.intent.terminated_at is not None:
                yield rank.attempt.intent.terminated_at + snapshot.spec.stop_grace_seconds


# Ranks and their agents


def _kill_silent_ranks(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    for rank in snapshot.ranks:
        if not snapshot.is_ending or now < _kill_at(snapshot, rank):  # else `_end_ranks` kills it
            yield from liveness.judge_silent_rank(snapshot, rank, now)


def _end_ranks(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """A forced stop kills ranks at once; any other end asks them first and waits its grace."""
    if not snapshot.is_ending:
        return
    reason = snapshot.end.reason or Reason.HEARTBEAT_TIMEOUT
    cause = Cause(reason=reason, message="did not end within the grace period and was killed")
    for rank in snapshot.ranks:
        intent = rank.attempt.intent
        if not rank.is_alive or intent.kill is not None:
            continue
        if now >= _kill_at(snapshot, rank):
            yield actions.KillProcess(rank=rank.rank, cause=cause)
        elif (
            intent.terminated_at is None
            and now >= _terminate_at(snapshot, rank)
            and plan_pool.may_terminate(snapshot, rank)
        ):
            yield actions.Terminate(rank=rank.rank)


def _terminate_at(snapshot: JobSnapshot, rank: RankSnapshot) -> float:
    """Return when a rank of an ending job is asked to save and exit."""
    end = snapshot.end
    if not snapshot.is_done or end.stop is not None:
        return end.since
    if not (rank.has_joined or snapshot.is_past_loop):  # in which a takeover may not know it yet
        return end.since
    if rank.attempt.died:  # its script goes on, for as long as it wants
        return liveness.NEVER_DUE
    total = rank.progress.total_steps
    exits = rank.is_exiting or rank.attempt.member.is_past_loop
    exits |= total is not None and rank.progress.step >= total
    return end.since + (snapshot.spec.exit_grace_seconds if exits else EXIT_SECONDS)


def _kill_at(snapshot: JobSnapshot, rank: RankSnapshot) -> float:
    """Return when a rank of an ending job that still runs is killed."""
    end, asked_at = snapshot.end, rank.attempt.intent.terminated_at
    if end.is_forced:
        return end.since
    if not snapshot.is_done or end.stop is not None:
        return end.ends_at
    if asked_at is None:
        return liveness.NEVER_DUE
    return asked_at + snapshot.spec.stop_grace_seconds


def _lose_hosts(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    ranks = snapshot.ranks_by_host() if snapshot.spans_hosts else {}
    for host, agent in snapshot.agents.items():
        if now >= liveness.host_deadline(snapshot, agent, ranks.get(host, ())):
            why = f"{snapshot.host_name(host)} does not answer: check its power and network"
            yield actions.LoseHost(host=host, why=why)
    if snapshot.partition is not None and snapshot.partition.count >= PARTITION_LIMIT:
        yield plan_pool.lose_partitioned_host(snapshot, snapshot.partition)


def _dismiss_idle_agents(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """Dismiss the agents of hosts that a job has left, such as after shrinking.

    So too of an unfit machine: the scheduler that has chosen it may choose another one.
    """
    is_fixed = not (snapshot.spans_hosts or snapshot.is_scheduled)
    if is_fixed or snapshot.is_ending or snapshot.all_finished:
        return  # `_finish_job` dismisses all of them
    ranks = snapshot.ranks_by_host()
    for host, agent in snapshot.agents.items():
        is_left = snapshot.spans_hosts and not snapshot.needs_agent(ranks[host])
        is_unfit = agent.is_unfit and snapshot.is_scheduled
        is_left |= is_unfit and not any(rank.is_alive for rank in ranks[host])
        if agent.is_wanted and is_left:
            if _has_logs(agent, now):
                yield from _ask_for_logs([agent])
            else:
                yield actions.DismissAgent(host=host)


def _ensure_agents(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    ranks = snapshot.ranks_by_host()
    for host, agent in snapshot.agents.items():
        if not snapshot.needs_agent(ranks[host]):
            continue
        if agent.state is AgentState.ABSENT:
            if now >= agent.start_at:
                yield actions.StartAgent(host=host)
        elif now >= liveness.agent_deadline(snapshot, agent, ranks[host]):
            yield actions.KillAgent(host=host)


def _start_ranks(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    if snapshot.is_ending or snapshot.is_gang:
        return
    due = (
        rank
        for rank in snapshot.ranks
        if rank.is_down and now >= rank.budget.start_at and snapshot.agent_of(rank).is_usable
        if not snapshot.is_held(rank)
    )
    most = snapshot.pool.room if snapshot.is_synchronous else None
    yield from (actions.Start(rank=rank.rank) for rank in islice(due, most))


# Gangs: programs that meet once at MASTER_PORT and cannot take in a new rank. If one rank dies, the
# others are ended, then all are started in one plan and so with one port, finished ranks included.


def _end_broken_gang(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """Ask the other ranks to exit; they may hang in a dead process group, so kill them in time."""
    if not snapshot.is_gang_broken or snapshot.is_ending:
        return
    for rank in snapshot.ranks:
        intent = rank.attempt.intent
        if not rank.is_alive or intent.kill is not None or not snapshot.agent_of(rank).is_connected:
            continue
        if intent.terminated_at is None:
            yield actions.Terminate(rank=rank.rank)
        elif now >= intent.terminated_at + snapshot.spec.stop_grace_seconds:
            yield actions.KillProcess(rank=rank.rank, cause=_STUBBORN)


def _start_gang(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """Start all ranks once none is left and every rank's backoff is over, from one checkpoint."""
    if not snapshot.is_gang or snapshot.is_ending:
        return
    agents = [snapshot.agent_of(rank) for rank in snapshot.ranks]
    if not all(agent.is_connected for agent in agents):
        return
    is_down = not snapshot.any_alive and any(rank.is_down for rank in snapshot.ranks)
    if not is_down or now < max(rank.budget.start_at for rank in snapshot.ranks):
        return
    if snapshot.is_held(snapshot.ranks[0]):
        return
    if snapshot.is_restore_known:
        yield from (actions.Start(rank=rank.rank) for rank in snapshot.ranks)
    elif not snapshot.is_listing:
        yield actions.ListCheckpoints(host=agents[0].host)


# The status of the job


def _finish_job(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """Give the job its last status once no agent can create files of it: they may then be deleted.

    A connected agent has created its files and exits when told. Any other may be about to. Before
    that, the last lines have to come from other hosts: readers stop at the last status.
    """
    last = _last_status(snapshot)
    if last is None:
        return
    agents = snapshot.agents.values()
    missing = [agent for agent in agents if _has_logs(agent, now)]
    yield from _ask_for_logs(missing)
    if missing:
        return
    if all(agent.is_connected or agent.state is AgentState.ABSENT for agent in agents):
        yield last
    yield from (actions.DismissAgent(host=agent.host) for agent in agents if agent.is_wanted)


def _ask_for_logs(agents: Iterable[AgentSnapshot]) -> Iterator[Action]:
    asked = (agent for agent in agents if agent.logs.state is RequestState.NONE)
    yield from (actions.DrainLogs(host=agent.host) for agent in asked)


def _has_logs(agent: AgentSnapshot, now: float) -> bool:
    """Return True while the last lines of ranks on another host are missing here and may come."""
    has_sender = not agent.is_local and agent.is_wanted and agent.state is not AgentState.STARTING
    is_over = agent.logs.is_open and now >= agent.logs.since + DRAIN_SECONDS
    return has_sender and agent.logs.state is not RequestState.ANSWERED and not is_over


def _last_status(snapshot: JobSnapshot) -> SetStatus | None:
    """Return the status of a job that ends and has no process left; None if it goes on."""
    if snapshot.any_alive:
        return None
    if snapshot.all_finished:
        return SetStatus(status=JobStatus.COMPLETED, message=snapshot.note)
    end = snapshot.end
    if (failure := end.failure) is not None:
        return SetStatus(status=JobStatus.FAILED, reason=failure.reason, message=failure.message)
    if end.stop is not None and snapshot.status in {JobStatus.STOPPING, JobStatus.QUEUED}:
        return SetStatus(
            status=JobStatus.STOPPED, reason=Reason.STOPPED_BY_USER, message=describe_stop(snapshot)
        )
    if end.kind is EndKind.INTERRUPTED and snapshot.status is JobStatus.STOPPING:
        return SetStatus(
            status=JobStatus.QUEUED,
            reason=Reason.INTERRUPTED,
            message="the service was shut down; the job resumes at the next start",
        )
    return None


def _update_status(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    if _last_status(snapshot) is not None:
        return
    wanted = _ending_status(snapshot) or _going_status(snapshot, now)
    if wanted != _same_status(snapshot):
        yield wanted


def _ending_status(snapshot: JobSnapshot) -> SetStatus | None:
    end = snapshot.end
    if (reason := end.reason) is None:
        return None
    if snapshot.status is JobStatus.QUEUED:
        return _same_status(snapshot)  # nothing runs, so there is no STOPPING in between
    message = "the service is shutting down; ranks are saving and exiting"
    if end.failure is not None:
        # Durable with the status, so that a successor does not restart a job that failed for good.
        message = end.failure.message
    elif end.stop is not None:
        message = "stop requested; ranks are saving and exiting"
    return SetStatus(status=JobStatus.STOPPING, reason=reason, message=message)


def _going_status(snapshot: JobSnapshot, now: float) -> SetStatus:
    of_pool = plan_pool.pool_status(snapshot)
    if of_pool is not None:
        return of_pool
    ranks = [rank for rank in snapshot.in_service if snapshot.is_needed(rank)]
    for rank in ranks:
        if rank.is_down and snapshot.is_held(rank) and any(snapshot.held.values()):
            words = describe_held(snapshot.held)
            return SetStatus(status=JobStatus.RECOVERING, reason=Reason.HOST_LOST, message=words)
        if rank.trouble is not None:
            return SetStatus(
                status=JobStatus.RECOVERING,
                reason=rank.trouble.reason,
                message=describe_recovery(snapshot, rank, rank.trouble),
            )
    # In a synchronous job a rank works only once it has joined the group.
    is_free = not snapshot.is_synchronous
    if all(rank.is_well and (is_free or rank.has_joined) for rank in ranks):
        message = describe_export(snapshot) if snapshot.is_past_loop else snapshot.note
        return SetStatus(status=JobStatus.RUNNING, message=message)
    if snapshot.status is not JobStatus.STARTING:
        return _same_status(snapshot)  # the failed rank is back, others have not reported yet
    reason, message = None, snapshot.note
    troubles = (agent.trouble for agent in snapshot.agents.values() if agent.trouble is not None)
    if (trouble := next(troubles, None)) is not None:
        reason, message = trouble.reason, trouble.message
    elif now >= liveness.agent_late_at(snapshot):
        reason = Reason.AGENT_LOST
        message = describe_late_agent(snapshot, liveness.AGENT_LATE_SECONDS)
    return SetStatus(status=JobStatus.STARTING, reason=reason, message=message)


def _same_status(snapshot: JobSnapshot) -> SetStatus:
    return SetStatus(status=snapshot.status, reason=snapshot.reason, message=snapshot.message)


_RULES: Final[tuple[Callable[[JobSnapshot, float], Iterator[Action]], ...]] = (
    _kill_silent_ranks,
    _end_ranks,
    _finish_job,
    _update_status,
    plan_pool.resize_pool,
    plan_pool.release_removed_ranks,
    plan_pool.stop_divergent_ranks,
    _end_broken_gang,
    plan_pool.publish_group,  # before new ranks start: the survivors wait for it
    _dismiss_idle_agents,
    _ensure_agents,
    _start_ranks,
    _start_gang,
)
