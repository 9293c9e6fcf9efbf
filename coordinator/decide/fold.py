"""What is known of one job: `fold` is pure, snapshot and observation in, snapshot out.

Messages of any attempt but the present one are ignored.
"""

from dataclasses import replace
from typing import assert_never

import msgspec
from msgspec.structs import asdict

from coordinator.decide import (
    actions,
    fold_agent,
    fold_code,
    fold_exit,
    fold_pool,
    fold_rank,
    gang_restore,
)
from coordinator.decide.actions import Observation
from coordinator.decide.events import excerpt
from coordinator.decide.state.job import JobSnapshot
from coordinator.decide.state.job_end import EndKind
from coordinator.decide.state.rank import RankSnapshot
from coordinator.decide.state.request import RequestState
from muster.contracts.errors import move
from muster.contracts.job.status import TRANSITIONS, JobStatus
from muster.contracts.messages import agent as agent_messages
from muster.contracts.messages import rank as rank_messages
from muster.contracts.messages.agent import RankDied, RankExited, RankSaid, RankSpawned
from muster.contracts.messages.rank import RankMessage
from muster.contracts.rank import ProcessRecord, ProcessState


def fold(  # noqa: C901, PLR0911, PLR0912  one case for each kind of observation
    snapshot: JobSnapshot, observation: Observation, now: float
) -> JobSnapshot:
    """Return the snapshot after `observation`. Unknown ranks and stale attempts change nothing."""
    match observation:
        case actions.ActionTaken():
            return _apply(snapshot, observation.action, now)
        case actions.AgentConnected() | actions.AgentDisconnected() | actions.AgentLost():
            return fold_agent.record(snapshot, observation, now)
        case actions.AgentWaits():
            return fold_agent.wait(snapshot, observation, now)
        case actions.AgentStarved():
            return fold_agent.note_starved(snapshot, observation, now)
        case actions.AgentSaid(message=agent_messages.AgentHeartbeat() as beat):
            return fold_agent.record_heartbeat(snapshot, observation.host, beat, now)
        case actions.AgentSaid(message=agent_messages.CheckpointsListed() as listed):
            return gang_restore.record_listing(snapshot, listed, now)
        case actions.AgentSaid():  # that its host has sent the last logs
            agent = snapshot.agents[observation.host]
            logs = agent.logs.move(RequestState.ANSWERED)
            return snapshot.with_agent(replace(agent, logs=logs))
        case actions.StopRequested(request=request, grace_seconds=grace):
            return replace(snapshot, end=snapshot.end.request(request, now, grace))
        case actions.Interrupted(why=why, grace_seconds=grace):
            grace = snapshot.spec.stop_grace_seconds if grace is None else grace
            end = snapshot.end.move(EndKind.INTERRUPTED, now, grace)
            return replace(snapshot, end=replace(end, interruption=why))
        case actions.LoopStalled(seconds=seconds):
            end = replace(snapshot.end, ends_at=snapshot.end.ends_at + seconds)
            return fold_agent.note_stall(replace(snapshot, end=end), seconds, now)
        case actions.CodeTaken():
            return fold_code.take(snapshot, observation)
        case actions.JobFailed():
            return snapshot.fail(observation.failure, now)
        case RankSpawned() | RankSaid() | RankDied() | RankExited():
            return _receive_of_rank(snapshot, observation, now)
        case actions.ChangeRequested():
            return fold_pool.serve_requests(replace(snapshot, **asdict(observation)))
        case actions.LeaveRequested():
            workers = {rank.attempt.worker_id: rank for rank in snapshot.in_service}
            leaving = workers.get(observation.worker_id)
            if leaving is None or snapshot.is_past_loop:
                return snapshot
            return fold_pool.remove(snapshot, leaving)
    assert_never(observation)


def _apply(snapshot: JobSnapshot, action: actions.Action, now: float) -> JobSnapshot:
    match action:
        case actions.OfHost():
            return fold_agent.apply(snapshot, action, now)
        case actions.SetStatus(status=status):
            if status is not snapshot.status:
                move(TRANSITIONS, snapshot.status, status)
            moved = replace(snapshot, status=status, reason=action.reason, message=action.message)
            if status is JobStatus.QUEUED:  # again, after an interruption
                return replace(moved, end=moved.end.move(EndKind.NONE, now, 0.0))
            return moved
        case actions.PublishGroup():
            return fold_pool.publish(snapshot, action.group, now)
        case actions.AddRank():
            return fold_pool.add(snapshot, action.rank)
        case _:
            return _apply_to_rank(snapshot, snapshot.ranks[action.rank], action, now)


def _apply_to_rank(
    snapshot: JobSnapshot, rank: RankSnapshot, action: actions.RankAction, now: float
) -> JobSnapshot:
    match action:
        case actions.RemoveRank():
            return fold_pool.remove(snapshot, rank)
        case actions.PlaceRank():
            return fold_agent.place(snapshot, rank, action.host)
        case actions.Start():
            started = fold_rank.begin_attempt(rank, now)
            return fold_pool.join(snapshot.with_rank(started), started, now)
        case actions.Terminate():
            asked = fold_rank.with_intent(rank, terminated_at=now, asked_at=now)
            left = fold_pool.leave(snapshot.pool, rank)
            return replace(snapshot.with_rank(asked), pool=left)
        case actions.KillProcess():
            killed = fold_rank.with_intent(rank, kill=action.cause, killed_at=now)
            return snapshot.with_rank(killed)
        case actions.Suspect():
            return snapshot.with_attempt(rank, rank.attempt.move(ProcessState.SUSPECT))
        case actions.ReportSlowExit():
            return snapshot.with_attempt(rank, replace(rank.attempt, is_slow_exit=True))
    assert_never(action)


# The ranks


def _receive_of_rank(
    snapshot: JobSnapshot, message: RankSpawned | RankSaid | RankDied | RankExited, now: float
) -> JobSnapshot:
    if not 0 <= message.rank < len(snapshot.ranks):
        return snapshot
    rank = snapshot.ranks[message.rank]
    if message.attempt != rank.attempt.number or not rank.is_alive:
        return snapshot
    match message:
        case RankSpawned():
            identity = msgspec.convert(message, ProcessRecord, from_attributes=True)
            located = fold_pool.locate(fold_agent.note_working(snapshot, rank), rank, message.node)
            return located.with_attempt(rank, replace(rank.attempt, identity=identity))
        case RankSaid():
            return _apply_message(snapshot, rank, message.message, now)
        case RankDied():
            return snapshot.with_attempt(rank, replace(rank.attempt, died=True))
        case RankExited():
            return fold_exit.end_attempt(snapshot, rank, message, now)
    assert_never(message)


def _apply_message(  # noqa: C901, PLR0911  one return for each kind of message
    snapshot: JobSnapshot, rank: RankSnapshot, message: RankMessage, now: float
) -> JobSnapshot:
    match message:
        case rank_messages.Executing():
            working = fold_agent.note_working(snapshot, rank)
            return working.with_rank(fold_rank.mark_alive(rank, now))
        case rank_messages.Hello():
            working = fold_agent.note_working(snapshot, rank)
            return working.with_rank(fold_rank.record_hello(rank, now))
        case rank_messages.Code(files=files):
            return fold_code.compare(snapshot, rank, files, now)
        case rank_messages.Heartbeat():
            changed = fold_rank.record_heartbeat(rank, message, snapshot.backoff, now)
            changed = fold_pool.confirm_finished(snapshot, changed)
            # In a synchronous job a rank reports its first step when it joins the group.
            if not snapshot.is_synchronous:
                changed = fold_rank.record_first_step(changed, message)
            return snapshot.with_rank(changed)
        case rank_messages.JoinedProcessEnded():
            return snapshot.with_rank(fold_rank.record_command(rank, now))
        case rank_messages.Warned():
            warned = replace(rank.attempt, warning=excerpt(message.message))
            return snapshot.with_attempt(rank, warned)
        case rank_messages.Orphaned():
            orphaned = fold_rank.with_intent(rank, orphaned_by=excerpt(message.by))
            return snapshot.with_rank(orphaned)
        case rank_messages.PermanentFailure():
            return fold_exit.record_permanent_error(snapshot, rank, message, now)
        case rank_messages.RestoreFailed():
            return gang_restore.record_damage(snapshot, rank, message)
        case rank_messages.Raised():
            return fold_exit.record_error(snapshot, rank, message, now)
        case _:
            return fold_pool.apply_message(snapshot, rank, message, now)
