"""What is known of one job: `fold` is pure, snapshot and observation in, snapshot out.

Messages of any attempt but the present one are ignored.
"""

from dataclasses import replace
from typing import Final, assert_never

from coordinator.decide import actions, fold_exit, fold_pool, fold_rank, gang_restore
from coordinator.decide.actions import Observation
from coordinator.decide.classify_exit import classify_unobserved
from coordinator.decide.events import printable
from coordinator.decide.state import (
    AGENT_FAILURES_LIMIT,
    NEVER,
    AgentState,
    Cause,
    GroupSnapshot,
    JobFailure,
    JobSnapshot,
    RankSnapshot,
)
from muster.contracts import job as job_rules
from muster.contracts import messages
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import (
    AgentHeartbeat,
    CheckpointsListed,
    RankDied,
    RankExited,
    RankMessage,
    RankSaid,
    RankSpawned,
)
from muster.contracts.rank import ProcessRecord

AGENT_LOST: Final = Cause(reason=Reason.AGENT_LOST, message="was ended with its agent")


def fold(  # noqa: C901, PLR0911  one return for each kind of observation
    snapshot: JobSnapshot, observation: Observation, now: float
) -> JobSnapshot:
    """Return the snapshot after `observation`. Unknown ranks and stale attempts change nothing."""
    match observation:
        case actions.ActionTaken():
            return _apply(snapshot, observation.action, now)
        case actions.AgentConnected() | actions.AgentDisconnected() | actions.AgentLost():
            return _change_agent(snapshot, observation, now)
        case actions.StopRequested():
            return _request_stop(snapshot, observation, now)
        case (
            actions.ScaleRequested()
            | actions.PauseRequested()
            | actions.CheckpointRequested()
            | actions.LeaveRequested()
        ):
            return fold_pool.note_request(snapshot, observation)
        case actions.Interrupted():
            grace = snapshot.spec.stop_grace_seconds
            stopped = replace(snapshot, interrupting=True, stop_grace_seconds=grace, stop_at=now)
            return snapshot if snapshot.is_ending else stopped
        case actions.LoopStalled(seconds=seconds):
            return replace(
                _shift_deadlines(snapshot, seconds, now),
                agent_since=min(now, snapshot.agent_since + seconds),
                agent_heard_at=min(now, snapshot.agent_heard_at + seconds),
            )
        case AgentHeartbeat():
            return _record_pulse(snapshot, observation, now)
        case CheckpointsListed():
            return gang_restore.record_listing(snapshot, observation, now)
        case actions.JobFailed():
            return fold_exit.fail_job(snapshot, observation.failure, now)
        case RankSpawned() | RankSaid() | RankDied() | RankExited():
            return _hear_rank(snapshot, observation, now)
    assert_never(observation)


def _apply(snapshot: JobSnapshot, action: actions.Action, now: float) -> JobSnapshot:
    match action:
        case actions.StartAgent():
            return replace(
                snapshot,
                agent=AgentState.STARTING,
                agent_since=now,
                generation=snapshot.generation + 1,
            )
        case actions.ListCheckpoints():
            return replace(snapshot, listing_since=now)
        case actions.KillAgent():
            # AgentLost follows when it is gone; if the kill has missed, it is repeated.
            return replace(snapshot, agent_since=now, listing_since=NEVER)
        case actions.DismissAgent():
            # A connected agent exits. Any other is known to be gone only with `AgentLost`.
            is_connected = snapshot.agent is AgentState.CONNECTED
            state = AgentState.ABSENT if is_connected else AgentState.LEAVING
            return replace(snapshot, agent=state, agent_since=now)
        case actions.SetStatus(status=status):
            if status is not snapshot.status:
                job_rules.move(snapshot.status, status)
            moved = replace(snapshot, status=status, reason=action.reason, message=action.message)
            # A job that is back in the queue is not interrupted any more.
            return replace(moved, interrupting=False) if status is JobStatus.QUEUED else moved
        case actions.AddRank() | actions.RemoveRank() | actions.PublishGroup():
            return fold_pool.apply(snapshot, action, now)
        case _:
            rank = fold_rank.apply(snapshot.ranks[action.rank], action, now)
            return fold_pool.follow(snapshot.with_rank(rank), rank, action, now)


# The agent


def _change_agent(
    snapshot: JobSnapshot,
    observation: actions.AgentConnected | actions.AgentDisconnected | actions.AgentLost,
    now: float,
) -> JobSnapshot:
    if observation.generation != snapshot.generation or snapshot.agent is AgentState.ABSENT:
        return snapshot  # an earlier agent, or one that was dismissed
    if snapshot.agent is AgentState.LEAVING:
        if not isinstance(observation, actions.AgentLost):
            return snapshot
        newest = max(snapshot.generation, observation.newest)
        return replace(snapshot, agent=AgentState.ABSENT, generation=newest)
    match observation:
        case actions.AgentConnected():
            # Silence until now was the connection's, so every deadline of the ranks starts again.
            ranks = tuple(
                replace(rank, heard_at=now, progressed_at=now, stopped_at=None)
                if rank.is_alive
                else rank
                for rank in snapshot.ranks
            )
            connected = replace(snapshot, agent_heard_at=now, ranks=ranks)
            return replace(connected, agent=AgentState.CONNECTED, agent_since=now)
        case actions.AgentDisconnected():
            return replace(snapshot, agent=AgentState.UNREACHABLE, agent_since=now)
        case actions.AgentLost():
            return _lose_agent(snapshot, observation, now)
    assert_never(observation)


def _record_pulse(snapshot: JobSnapshot, pulse: AgentHeartbeat, now: float) -> JobSnapshot:
    """Shift the deadlines of the ranks by the time in which their agent was silent."""
    unheard_seconds = now - snapshot.agent_fresh_until
    if unheard_seconds > 0:
        snapshot = _shift_deadlines(snapshot, unheard_seconds, now)
    stopped = set(pulse.stopped)
    for rank in snapshot.ranks:
        is_stopped = rank.is_alive and (rank.rank, rank.attempt) in stopped
        if is_stopped != (rank.stopped_at is not None):
            stopped_at = now if is_stopped else None
            snapshot = snapshot.with_rank(replace(rank, stopped_at=stopped_at))
    return replace(snapshot, agent_heard_at=now)


def _lose_agent(snapshot: JobSnapshot, lost: actions.AgentLost, now: float) -> JobSnapshot:
    """Ranks wait for the next agent or are gone. That is not their failure and not a restart."""
    failures = snapshot.agent_failures + 1
    if failures > AGENT_FAILURES_LIMIT:
        message = f"{failures} agents in a row were lost before a rank came alive: {lost.message}"
        failure = JobFailure(reason=Reason.AGENT_LOST, message=message)
        snapshot = fold_exit.fail_job(snapshot, failure, now)
    ending = classify_unobserved(snapshot, AGENT_LOST)
    ranks = tuple(
        fold_rank.orphan(rank, now)
        if rank.rank in lost.living
        else fold_rank.end_unobserved(rank, ending)
        for rank in snapshot.ranks
    )
    gone = [
        rank.rank
        for rank in snapshot.ranks
        if rank.identity is not None and rank.rank not in lost.living
    ]
    pause = 0.0  # the first loss after a working agent is repaired at once
    if failures > 1:
        pause = snapshot.backoff.delay_seconds(failures - 1, f"{snapshot.uid}/agent")
    snapshot = replace(
        snapshot,
        agent=AgentState.ABSENT,
        # If another coordinator numbers agents now, it holds our lease: this is never committed.
        generation=max(snapshot.generation, lost.newest),
        agent_failures=failures,
        agent_start_at=now + pause,
        listing_since=NEVER,
        ranks=ranks,
        pool=fold_pool.keep_living(
            snapshot.pool, {rank.worker_id for rank in ranks if rank.is_alive}
        ),
        # The next agent creates new shared memory, which takes another group round.
        group=GroupSnapshot(round=snapshot.group.round),
    )
    # Before a rank has a process, the failure counts for the agent alone.
    for number in gone:
        snapshot = fold_exit.count_end_with_agent(snapshot, snapshot.ranks[number], now)
    return snapshot


def _reset_agent_failures(snapshot: JobSnapshot) -> JobSnapshot:
    """An agent with a running rank works; the agents lost before it do not count any more."""
    return replace(snapshot, agent_failures=0) if snapshot.agent_failures else snapshot


# Requests and deadlines


def _request_stop(snapshot: JobSnapshot, asked: actions.StopRequested, now: float) -> JobSnapshot:
    """A job that ends already may get less time from a stop request, never more."""
    if snapshot.stop in {asked.request, StopRequest.FORCED}:
        return snapshot
    stopped = replace(snapshot, stop=asked.request)
    ends_at = snapshot.stop_at + snapshot.stop_grace_seconds
    if snapshot.is_ending and ends_at <= now + asked.grace_seconds:
        return stopped
    return replace(stopped, stop_grace_seconds=asked.grace_seconds, stop_at=now)


def _shift_deadlines(snapshot: JobSnapshot, seconds: float, now: float) -> JobSnapshot:
    """Shift the deadlines of the ranks by the time in which they could not be heard."""
    ranks = tuple(fold_rank.shift_deadlines(rank, seconds, now) for rank in snapshot.ranks)
    return replace(snapshot, ranks=ranks)


# The ranks


def _hear_rank(
    snapshot: JobSnapshot, message: RankSpawned | RankSaid | RankDied | RankExited, now: float
) -> JobSnapshot:
    if not 0 <= message.rank < len(snapshot.ranks):
        return snapshot
    rank = snapshot.ranks[message.rank]
    if message.incarnation != rank.attempt or not rank.is_alive:
        return snapshot
    match message:
        case RankSpawned():
            identity = ProcessRecord(
                pid=message.pid,
                start_ticks=message.start_ticks,
                boot_id=message.boot_id,
                node=message.node,
                pid_namespace=message.pid_namespace,
            )
            located = fold_pool.locate(_reset_agent_failures(snapshot), rank, message.node)
            return located.with_rank(replace(rank, identity=identity))
        case RankSaid():
            return _apply_message(snapshot, rank, message.message, now)
        case RankDied():
            return snapshot.with_rank(replace(rank, died=True))
        case RankExited():
            return fold_exit.end_attempt(snapshot, rank, message, now)
    assert_never(message)


def _apply_message(  # noqa: C901, PLR0911  one return for each kind of message
    snapshot: JobSnapshot, rank: RankSnapshot, message: RankMessage, now: float
) -> JobSnapshot:
    match message:
        case messages.Executing():
            return _reset_agent_failures(snapshot).with_rank(fold_rank.mark_alive(rank, now))
        case messages.Hello():
            return _reset_agent_failures(snapshot).with_rank(fold_rank.record_hello(rank, now))
        case messages.Heartbeat():
            changed = fold_rank.record_heartbeat(rank, message, snapshot.backoff, now)
            # In a synchronous job a rank reports its first step when it joins the group.
            if not snapshot.is_synchronous:
                changed = fold_rank.record_first_step(changed, message)
            return snapshot.with_rank(changed)
        case messages.Warned():
            return snapshot.with_rank(replace(rank, warning=printable(message.message)))
        case messages.Orphaned():
            return snapshot.with_rank(replace(rank, orphaned_by=printable(message.by)))
        case (
            messages.Ready()
            | messages.JoinedGroup()
            | messages.PeerLost()
            | messages.StateMismatch()
            | messages.Saved()
        ):
            return fold_pool.apply_message(snapshot, rank, message, now)
        case messages.PermanentFailure():
            return fold_exit.record_permanent_error(snapshot, rank, message, now)
        case messages.RestoreFailed():
            return gang_restore.record_damage(snapshot, rank, message)
        case messages.Raised():
            return fold_exit.record_error(snapshot, rank, message, now)
    assert_never(message)
