"""What happened → what is known, for one job.

`fold` is pure: snapshot and happening in, snapshot out. Messages of an incarnation that is not the
present one change nothing: a stale process cannot speak for its successor.
"""

from dataclasses import replace
from typing import assert_never

from coordinator import actions, end_fold, happenings, pool_fold, rank_fold
from coordinator.classes import ending_unseen
from coordinator.happenings import Happening
from coordinator.snapshot import (
    AGENT_FAILURES_LIMIT,
    AgentState,
    Cause,
    JobSnapshot,
    LayoutSnapshot,
    RankSnapshot,
    Verdict,
)
from coordinator.wording import legible
from muster.contracts import job as job_rules
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import (
    Beat,
    Disputed,
    Executing,
    Hello,
    Orphaned,
    Pulse,
    Raised,
    RankExited,
    RankMessage,
    RankSaid,
    RankSpawned,
    Ready,
    Refused,
    Saved,
    Stranded,
    TookUp,
    Warned,
)
from muster.contracts.process import ProcessRecord

AGENT_LOST = Cause(reason=Reason.AGENT_LOST, message="was ended with its agent")


def fold(  # noqa: PLR0911  one for each kind of happening
    snapshot: JobSnapshot, happening: Happening, now: float
) -> JobSnapshot:
    """Return what is known once `happening` is. Unknown ranks and stale incarnations: no change."""
    match happening:
        case happenings.Taken():
            return _taken(snapshot, happening.action, now)
        case happenings.AgentJoined() | happenings.AgentDropped() | happenings.AgentLost():
            return _agent_changed(snapshot, happening, now)
        case happenings.StopAsked():
            return _stop_asked(snapshot, happening, now)
        case happenings.Scaled() | happenings.PauseAsked() | happenings.LeaveAsked():
            return pool_fold.asked(snapshot, happening)
        case happenings.Interrupted():
            return _interrupted(snapshot, now)
        case happenings.Overslept():
            return _overslept(snapshot, happening.seconds, now)
        case Pulse():
            return _pulsed(snapshot, happening, now)
        case happenings.Condemned():
            return end_fold.condemned(snapshot, happening.verdict, now)
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
            # Who hears it goes; of anybody else it is not known before `AgentLost`.
            is_heard = snapshot.agent is AgentState.CONNECTED
            gone = AgentState.ABSENT if is_heard else AgentState.LEAVING
            return replace(snapshot, agent=gone, agent_since=now)
        case actions.Move():
            return _job_moved(snapshot, action)
        case actions.Enlist() | actions.Retire() | actions.Announce():
            return pool_fold.taken(snapshot, action, now)
        case _:
            rank = rank_fold.taken(snapshot.ranks[action.rank], action, now)
            return pool_fold.followed(snapshot.with_rank(rank), rank, action, now)


def _job_moved(snapshot: JobSnapshot, move: actions.Move) -> JobSnapshot:
    if move.status is not snapshot.status:
        job_rules.move(snapshot.status, move.status)
    moved = replace(snapshot, status=move.status, reason=move.reason, message=move.message)
    # Back in the queue, whatever sent it there is over.
    return replace(moved, interrupting=False) if move.status is JobStatus.QUEUED else moved


def _agent_changed(
    snapshot: JobSnapshot,
    happening: happenings.AgentJoined | happenings.AgentDropped | happenings.AgentLost,
    now: float,
) -> JobSnapshot:
    if happening.generation != snapshot.generation or snapshot.agent is AgentState.ABSENT:
        return snapshot  # a predecessor, or one we sent away
    if snapshot.agent is AgentState.LEAVING:
        if not isinstance(happening, happenings.AgentLost):
            return snapshot
        newest = max(snapshot.generation, happening.newest)
        return replace(snapshot, agent=AgentState.ABSENT, generation=newest)
    match happening:
        case happenings.AgentJoined():
            return _agent_joined(snapshot, now)
        case happenings.AgentDropped():
            return replace(snapshot, agent=AgentState.UNREACHABLE, agent_since=now)
        case happenings.AgentLost():
            return _agent_lost(snapshot, happening, now)
    assert_never(happening)


def _agent_joined(snapshot: JobSnapshot, now: float) -> JobSnapshot:
    """Silence until now was the connection's, so every deadline of the ranks begins anew."""
    ranks = tuple(
        replace(rank, heard_at=now, progressed_at=now, stopped_at=None) if rank.is_alive else rank
        for rank in snapshot.ranks
    )
    return replace(
        snapshot, agent=AgentState.CONNECTED, agent_since=now, agent_heard_at=now, ranks=ranks
    )


def _pulsed(snapshot: JobSnapshot, pulse: Pulse, now: float) -> JobSnapshot:
    """The agent is there; while it was not, nobody could be heard, and no time has passed."""
    unheard_seconds = now - snapshot.agent_vouches_until
    if unheard_seconds > 0:
        snapshot = _pushed_on(snapshot, unheard_seconds, now)
    stopped = set(pulse.stopped)
    for rank in snapshot.ranks:
        is_stopped = rank.is_alive and (rank.rank, rank.incarnation) in stopped
        if is_stopped != (rank.stopped_at is not None):
            stopped_at = now if is_stopped else None
            snapshot = snapshot.with_rank(replace(rank, stopped_at=stopped_at))
    return replace(snapshot, agent_heard_at=now)


def _agent_lost(snapshot: JobSnapshot, lost: happenings.AgentLost, now: float) -> JobSnapshot:
    """Ranks wait for the next agent, or are gone. That is no failure of theirs and no restart."""
    failures = snapshot.agent_failures + 1
    if failures > AGENT_FAILURES_LIMIT:
        snapshot = end_fold.condemned(snapshot, _out_of_agents(failures, lost.message), now)
    ending = ending_unseen(snapshot, AGENT_LOST)
    ranks = tuple(
        rank_fold.orphaned(rank, now)
        if rank.rank in lost.living
        else rank_fold.ended_unseen(rank, ending)
        for rank in snapshot.ranks
    )
    gone = [
        rank.rank
        for rank in snapshot.ranks
        if rank.identity is not None and rank.rank not in lost.living
    ]
    snapshot = replace(
        snapshot,
        agent=AgentState.ABSENT,
        # Whoever else were to number agents had our lease, and this would never be durable.
        generation=max(snapshot.generation, lost.newest),
        agent_failures=failures,
        agent_start_at=now + _pause_seconds(snapshot, failures),
        ranks=ranks,
        pool=pool_fold.left_by_the_dead(snapshot.pool, ranks),
        # The next agent gives them other memory to meet in, so it takes another layout.
        layout=LayoutSnapshot(generation=snapshot.layout.generation),
    )
    # Of a rank that was no process yet the agent's own failures are counted.
    for number in gone:
        snapshot = end_fold.gone_with_its_agent(snapshot, snapshot.ranks[number], now)
    return snapshot


def _pause_seconds(snapshot: JobSnapshot, failures: int) -> float:
    """Return how long the next agent waits; after one that has worked it does not wait at all."""
    if failures == 1:
        return 0.0
    return snapshot.backoff.delay_seconds(failures - 1, f"{snapshot.uid}/agent")


def _out_of_agents(failures: int, message: str) -> Verdict:
    return Verdict(
        reason=Reason.AGENT_LOST,
        message=f"{failures} agents in a row were lost before a rank came alive: {message}",
    )


def _stop_asked(snapshot: JobSnapshot, asked: happenings.StopAsked, now: float) -> JobSnapshot:
    """Who ends already, for whatever reason, may have less time from now on, and never more."""
    if snapshot.stop in {asked.request, StopRequest.FORCED}:
        return snapshot
    stopped = replace(snapshot, stop=asked.request)
    ends_at = snapshot.stop_at + snapshot.stop_grace_seconds
    if snapshot.is_ending and ends_at <= now + asked.grace_seconds:
        return stopped
    return replace(stopped, stop_grace_seconds=asked.grace_seconds, stop_at=now)


def _interrupted(snapshot: JobSnapshot, now: float) -> JobSnapshot:
    if snapshot.is_ending:
        return snapshot
    return replace(
        snapshot,
        interrupting=True,
        stop_grace_seconds=snapshot.spec.stop_grace_seconds,
        stop_at=now,
    )


def _overslept(snapshot: JobSnapshot, seconds: float, now: float) -> JobSnapshot:
    """Push on every deadline that somebody else has to meet."""
    return replace(
        _pushed_on(snapshot, seconds, now),
        agent_since=min(now, snapshot.agent_since + seconds),
        agent_heard_at=min(now, snapshot.agent_heard_at + seconds),
    )


def _pushed_on(snapshot: JobSnapshot, seconds: float, now: float) -> JobSnapshot:
    """Push on every deadline of the ranks: for so long nobody could know how they are."""
    ranks = tuple(rank_fold.pushed_on(rank, seconds, now) for rank in snapshot.ranks)
    return replace(snapshot, ranks=ranks)


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
            located = pool_fold.located(_forgiven(snapshot), rank, message.node)
            return located.with_rank(replace(rank, identity=identity))
        case RankSaid():
            return _said(snapshot, rank, message.message, now)
        case RankExited():
            return end_fold.exited(snapshot, rank, message, now)
    assert_never(message)


def _said(
    snapshot: JobSnapshot, rank: RankSnapshot, message: RankMessage, now: float
) -> JobSnapshot:
    match message:
        case Executing():
            return _forgiven(snapshot).with_rank(rank_fold.alive(rank, now))
        case Hello():
            return _forgiven(snapshot).with_rank(rank_fold.greeted(rank, now))
        case Beat():
            beaten = rank_fold.beaten(rank, message, snapshot.backoff, now)
            # Who trains with others says where it is when it takes their state up.
            placed = beaten if snapshot.is_synchronous else rank_fold.placed(beaten, message)
            return snapshot.with_rank(placed)
        case Warned():
            return snapshot.with_rank(replace(rank, warning=legible(message.message)))
        case Orphaned():
            return snapshot.with_rank(replace(rank, orphaned_by=legible(message.by)))
        case Ready() | TookUp() | Stranded() | Disputed() | Saved():
            return pool_fold.said(snapshot, rank, message, now)
        case Refused():
            return end_fold.refused(snapshot, rank, message, now)
        case Raised():
            return end_fold.raised(snapshot, rank, message, now)
    assert_never(message)


def _forgiven(snapshot: JobSnapshot) -> JobSnapshot:
    """An agent that has ranks works; the agents lost before it no longer count."""
    return replace(snapshot, agent_failures=0) if snapshot.agent_failures else snapshot
