"""What happened → what is known. `fold` is pure: snapshot and happening in, snapshot out.

Messages of an incarnation that is not the present one change nothing: a stale process cannot
speak for its successor.
"""

from dataclasses import replace
from typing import assert_never

from coordinator import actions, happenings
from coordinator.happenings import Happening
from coordinator.snapshot import NEVER, AgentState, Cause, JobSnapshot, RankSnapshot, Verdict
from coordinator.wording import describe_exit, quote_end
from muster.contracts import job as job_rules
from muster.contracts import rank as rank_rules
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import (
    Beat,
    Executing,
    Hello,
    RankExited,
    RankMessage,
    RankSaid,
    RankSpawned,
    Refused,
    Warned,
)
from muster.contracts.process import ProcessRecord
from muster.contracts.rank import ProcessState

THROUGHPUT_WINDOW_SECONDS = 1.0
"""Steps are counted over at least this long: beats may come much closer together."""

THROUGHPUT_WEIGHT = 0.5
"""Of the newest window, in a moving average."""

AGENT_FAILURES_LIMIT = 10
"""Agents lost in a row, none of whose ranks came alive: this machine cannot run the job."""

AGENT_LOST = Cause(reason=Reason.AGENT_LOST, message="was ended with its agent")

PREEMPTED = Cause(
    reason=Reason.WORKER_EXITED, message="was asked to stop by somebody else and saved its work"
)


def fold(snapshot: JobSnapshot, happening: Happening, now: float) -> JobSnapshot:
    """Return what is known once `happening` is. Unknown ranks and stale incarnations: no change."""
    match happening:
        case happenings.Taken():
            return _taken(snapshot, happening.action, now)
        case happenings.AgentJoined() | happenings.AgentDropped() | happenings.AgentLost():
            return _agent_changed(snapshot, happening, now)
        case happenings.StopAsked():
            return _stop_asked(snapshot, happening, now)
        case happenings.Interrupted():
            return _interrupted(snapshot, now)
        case happenings.Overslept():
            return _overslept(snapshot, happening.seconds)
        case happenings.Condemned():
            return replace(snapshot, verdict=snapshot.verdict or happening.verdict)
        case RankSpawned() | RankSaid() | RankExited():
            return _from_rank(snapshot, happening, now)
    assert_never(happening)


def _taken(snapshot: JobSnapshot, action: actions.Action, now: float) -> JobSnapshot:
    match action:
        case actions.StartAgent():
            return replace(
                snapshot,
                agent=AgentState.STARTING,
                agent_since=now,
                generation=snapshot.generation + 1,
            )
        case actions.KillAgent():
            # AgentLost follows when it is gone; should the kill have missed, it is repeated.
            return replace(snapshot, agent_since=now)
        case actions.DismissAgent():
            return replace(snapshot, agent=AgentState.ABSENT)
        case actions.Move():
            return _job_moved(snapshot, action)
        case _:
            return snapshot.with_rank(_taken_for_rank(snapshot.ranks[action.rank], action, now))


def _job_moved(snapshot: JobSnapshot, move: actions.Move) -> JobSnapshot:
    if move.status is not snapshot.status:
        job_rules.move(snapshot.status, move.status)
    moved = replace(snapshot, status=move.status, reason=move.reason, message=move.message)
    # Back in the queue, whatever sent it there is over.
    return replace(moved, interrupting=False) if move.status is JobStatus.QUEUED else moved


def _taken_for_rank(rank: RankSnapshot, action: actions.RankAction, now: float) -> RankSnapshot:
    match action:
        case actions.Start():
            return _started(rank, now)
        case actions.Terminate():
            return replace(rank, terminated=True)
        case actions.KillProcess():
            return replace(rank, kill=action.cause, killed_at=now)
        case actions.Suspect():
            return _moved(rank, ProcessState.SUSPECT)
    assert_never(action)


def _started(rank: RankSnapshot, now: float) -> RankSnapshot:
    return replace(
        rank,
        incarnation=rank.incarnation + 1,
        process=ProcessState.SPAWNED,
        identity=None,
        beats=False,
        spawned_at=now,
        heard_at=now,
        progressed_at=NEVER,
        live_at=NEVER,
        terminated=False,
        stopping=False,
        kill=None,
        warning=None,
        exit_code=None,
        exit_signal=None,
        checkpoints_before=rank.checkpoints_before + rank.checkpoints_saved,
        checkpoints_saved=0,
        throughput_steps_per_sec=0.0,
        measured_at=NEVER,
    )


def _moved(rank: RankSnapshot, target: ProcessState) -> RankSnapshot:
    if rank.process is target:
        return rank
    return replace(rank, process=rank_rules.move(rank.process, target))


def _agent_changed(
    snapshot: JobSnapshot,
    happening: happenings.AgentJoined | happenings.AgentDropped | happenings.AgentLost,
    now: float,
) -> JobSnapshot:
    if happening.generation != snapshot.generation or snapshot.agent is AgentState.ABSENT:
        return snapshot  # a predecessor, or one we sent away
    match happening:
        case happenings.AgentJoined():
            return _agent_joined(snapshot, now)
        case happenings.AgentDropped():
            return replace(snapshot, agent=AgentState.UNREACHABLE, agent_since=now)
        case happenings.AgentLost():
            return _agent_lost(snapshot, happening.message, now)
    assert_never(happening)


def _agent_joined(snapshot: JobSnapshot, now: float) -> JobSnapshot:
    """Silence until now was the connection's, so every deadline of the ranks begins anew."""
    ranks = tuple(
        replace(rank, heard_at=now, progressed_at=now) if rank.is_alive else rank
        for rank in snapshot.ranks
    )
    return replace(snapshot, agent=AgentState.CONNECTED, agent_since=now, ranks=ranks)


def _agent_lost(snapshot: JobSnapshot, message: str, now: float) -> JobSnapshot:
    """Every process of the job is gone. That is no failure of the ranks: nothing is counted."""
    failures = snapshot.agent_failures + 1
    if failures > AGENT_FAILURES_LIMIT and snapshot.verdict is None:
        snapshot = replace(snapshot, verdict=_out_of_agents(failures, message))
    return replace(
        snapshot,
        agent=AgentState.ABSENT,
        agent_failures=failures,
        agent_start_at=now + snapshot.backoff.delay_seconds(failures, f"{snapshot.uid}/agent"),
        ranks=tuple(ended_unseen(rank, AGENT_LOST) for rank in snapshot.ranks),
    )


def _out_of_agents(failures: int, message: str) -> Verdict:
    return Verdict(
        reason=Reason.AGENT_LOST,
        message=f"{failures} agents in a row were lost before a rank came alive: {message}",
    )


def ended_unseen(rank: RankSnapshot, trouble: Cause | None) -> RankSnapshot:
    """Return the rank without its process, which is gone for no fault of its own."""
    if not rank.is_alive:
        return rank
    return replace(
        rank,
        process=ProcessState.EXITED,
        identity=None,
        throughput_steps_per_sec=0.0,
        trouble=trouble,
    )


def _stop_asked(snapshot: JobSnapshot, asked: happenings.StopAsked, now: float) -> JobSnapshot:
    if snapshot.stop in {asked.request, StopRequest.FORCED}:
        return snapshot
    return replace(
        snapshot, stop=asked.request, stop_grace_seconds=asked.grace_seconds, stop_at=now
    )


def _interrupted(snapshot: JobSnapshot, now: float) -> JobSnapshot:
    if snapshot.stop is not None or snapshot.interrupting:
        return snapshot
    return replace(
        snapshot,
        interrupting=True,
        stop_grace_seconds=snapshot.spec.stop_grace_seconds,
        stop_at=now,
    )


def _overslept(snapshot: JobSnapshot, seconds: float) -> JobSnapshot:
    """Push on every deadline that somebody else has to meet."""
    ranks = tuple(
        replace(
            rank,
            spawned_at=rank.spawned_at + seconds,
            heard_at=rank.heard_at + seconds,
            progressed_at=rank.progressed_at + seconds,
            killed_at=rank.killed_at + seconds,
        )
        if rank.is_alive
        else rank
        for rank in snapshot.ranks
    )
    return replace(snapshot, agent_since=snapshot.agent_since + seconds, ranks=ranks)


def _from_rank(
    snapshot: JobSnapshot, message: RankSpawned | RankSaid | RankExited, now: float
) -> JobSnapshot:
    if not 0 <= message.rank < len(snapshot.ranks):
        return snapshot
    rank = snapshot.ranks[message.rank]
    if message.incarnation != rank.incarnation or not rank.is_alive:
        return snapshot
    match message:
        case RankSpawned():
            identity = ProcessRecord(
                pid=message.pid,
                start_ticks=message.start_ticks,
                boot_id=message.boot_id,
                node=message.node,
            )
            return snapshot.with_rank(replace(rank, identity=identity))
        case RankSaid():
            return _said(snapshot, rank, message.message, now)
        case RankExited():
            return _exited(snapshot, rank, message, now)
    assert_never(message)


def _said(
    snapshot: JobSnapshot, rank: RankSnapshot, message: RankMessage, now: float
) -> JobSnapshot:
    match message:
        case Executing():
            return _forgiven(snapshot).with_rank(_alive(rank, now))
        case Hello():
            return _forgiven(snapshot).with_rank(_greeted(rank, now))
        case Beat():
            return snapshot.with_rank(_beaten(snapshot, rank, message, now))
        case Warned():
            return snapshot.with_rank(replace(rank, warning=message.message))
        case Refused():
            verdict = Verdict(
                reason=message.reason, message=f"rank {rank.rank}: {message.message}", exit_code=1
            )
            return replace(snapshot, verdict=snapshot.verdict or verdict)
    assert_never(message)


def _forgiven(snapshot: JobSnapshot) -> JobSnapshot:
    """An agent whose ranks come alive works; the agents lost before it no longer count."""
    return replace(snapshot, agent_failures=0) if snapshot.agent_failures else snapshot


def _alive(rank: RankSnapshot, now: float) -> RankSnapshot:
    first = rank.process is ProcessState.SPAWNED
    return replace(
        _moved(rank, ProcessState.LIVE),
        heard_at=now,
        live_at=now if first else rank.live_at,
        trouble=None,
    )


def _greeted(rank: RankSnapshot, now: float) -> RankSnapshot:
    """From the first hello on silence and lack of progress mean something."""
    progressed_at = rank.progressed_at if rank.beats else now
    return replace(_alive(rank, now), beats=True, progressed_at=progressed_at)


def _beaten(snapshot: JobSnapshot, rank: RankSnapshot, beat: Beat, now: float) -> RankSnapshot:
    rank = _greeted(rank, now)
    healthy_seconds = now - rank.live_at
    return replace(
        _measured(rank, beat.step, now),
        step=beat.step,
        total_steps=beat.total_steps,
        epoch=beat.epoch,
        shard_idx=beat.shard_idx,
        line_idx=beat.line_idx,
        loss=beat.loss,
        metrics=beat.metrics,
        stopping=beat.stopping,
        progressed_at=now if beat.step != rank.step else rank.progressed_at,
        failures=snapshot.backoff.failures_after(rank.failures, healthy_seconds),
        checkpoints_saved=beat.checkpoints_saved,
        last_checkpoint_step=(
            rank.last_checkpoint_step
            if beat.last_checkpoint_step is None
            else beat.last_checkpoint_step
        ),
    )


def _measured(rank: RankSnapshot, step: int, now: float) -> RankSnapshot:
    """Bring the throughput up to date once a window has passed."""
    if rank.measured_at == NEVER:
        return replace(rank, measured_at=now, measured_step=step)
    seconds = now - rank.measured_at
    if seconds < THROUGHPUT_WINDOW_SECONDS:
        return rank
    newest = max(0, step - rank.measured_step) / seconds
    before = rank.throughput_steps_per_sec or newest
    return replace(
        rank,
        throughput_steps_per_sec=THROUGHPUT_WEIGHT * newest + (1 - THROUGHPUT_WEIGHT) * before,
        measured_at=now,
        measured_step=step,
    )


def _exited(
    snapshot: JobSnapshot, rank: RankSnapshot, exited: RankExited, now: float
) -> JobSnapshot:
    ended = replace(
        _moved(rank, ProcessState.EXITED),
        identity=None,
        exit_code=exited.exit_code,
        exit_signal=exited.signal,
        throughput_steps_per_sec=0.0,
    )
    if exited.exit_code == 0:
        return snapshot.with_rank(_exited_well(ended))
    if snapshot.is_ending:
        return snapshot.with_rank(ended)
    # What a program says last before it gives up is why; before a signal it knew of nothing.
    quote = quote_end(exited.last_lines) if exited.signal is None else ""
    cause = rank.kill or Cause(reason=Reason.WORKER_EXITED, message=describe_exit(ended) + quote)
    return _failed(snapshot, replace(ended, trouble=cause), exited, now)


def _exited_well(rank: RankSnapshot) -> RankSnapshot:
    """Code 0 means done, unless it had been asked to go: then work may be left."""
    if rank.terminated:
        return rank
    if rank.stopping:
        return replace(rank, trouble=PREEMPTED)
    return replace(rank, finished=True, trouble=None)


def _failed(
    snapshot: JobSnapshot, rank: RankSnapshot, exited: RankExited, now: float
) -> JobSnapshot:
    """Count the failure; either schedule the next incarnation or give the job up."""
    if rank.restarts >= snapshot.spec.max_restarts:
        return replace(snapshot.with_rank(rank), verdict=_out_of_restarts(snapshot, rank, exited))
    healthy_seconds = 0.0 if rank.live_at == NEVER else now - rank.live_at
    failures = 1 + snapshot.backoff.failures_after(rank.failures, healthy_seconds)
    delay = snapshot.backoff.delay_seconds(failures, f"{snapshot.uid}/{rank.rank}")
    return snapshot.with_rank(
        replace(rank, restarts=rank.restarts + 1, failures=failures, start_at=now + delay)
    )


def _out_of_restarts(snapshot: JobSnapshot, rank: RankSnapshot, exited: RankExited) -> Verdict:
    lines = "".join(f"\n  {line}" for line in exited.last_lines)
    limit = snapshot.spec.max_restarts
    end = describe_exit(rank) if rank.kill is None else rank.kill.message
    return Verdict(
        reason=Reason.RESTART_LIMIT,
        message=(
            f"rank {rank.rank} {end} and has used its {limit} restarts"
            + (f"; the last lines of its log:{lines}" if lines else "; its log is empty")
        ),
        exit_code=exited.exit_code if exited.exit_code is not None else 128 + (exited.signal or 0),
    )
