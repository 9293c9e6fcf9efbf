"""The part of `fold` that concerns the agents of a job. Pure; losing one touches only its host."""

from collections.abc import Collection
from dataclasses import replace
from typing import Final, TypeAlias, assert_never

from coordinator.decide import actions, fold_exit, fold_pool, fold_rank
from coordinator.decide.classify_exit import classify_unobserved
from coordinator.decide.state.job import (
    AGENT_FAILURES_LIMIT,
    AgentSnapshot,
    GroupSnapshot,
    JobSnapshot,
)
from coordinator.decide.state.job_end import JobFailure
from coordinator.decide.state.rank import Cause, RankSnapshot
from coordinator.decide.state.request import RequestState
from muster.contracts.agent import AgentState
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import AgentHeartbeat

AGENT_LOST: Final = Cause(reason=Reason.AGENT_LOST, message="was ended with its agent")

CUT_PAUSE_SECONDS: Final = 60.0
"""A host that others cannot reach is tried again after this; each trial stops training."""

AgentChange: TypeAlias = actions.AgentConnected | actions.AgentDisconnected | actions.AgentLost


def apply(snapshot: JobSnapshot, action: actions.AgentAction, now: float) -> JobSnapshot:
    """Note an action that was decided about an agent."""
    agent = snapshot.agents[action.host]
    match action:
        case actions.StartAgent():
            started = agent.move(AgentState.STARTING, now)
            # Silence counts from the start, unless ranks wait there for this agent.
            has_ranks = any(rank.is_alive for rank in snapshot.ranks_on(agent.host))
            changed = replace(
                started,
                agent_number=agent.agent_number + 1,
                seen_at=agent.seen_at if has_ranks else now,
                is_unfit=False,  # it was away, or a scheduler chooses another machine
            )
        case actions.ListCheckpoints():
            changed = replace(agent, listing=agent.listing.move(RequestState.ASKED, now))
        case actions.DrainLogs():
            changed = replace(agent, logs=agent.logs.move(RequestState.ASKED, now))
        case actions.KillAgent():
            # AgentLost follows when it is gone; if the kill has missed, it is repeated.
            changed = replace(agent, since=now, listing=agent.listing.move(RequestState.NONE))
        case actions.LoseHost():
            words = f"was given up with its host: {action.why}"
            lost = Cause(reason=Reason.HOST_LOST, message=words)
            return replace(_give_up(snapshot, agent, lost, now), partition=None)
        case actions.DismissAgent():
            # A connected agent exits. Any other is known to be gone only with `AgentLost`.
            target = AgentState.ABSENT if agent.is_connected else AgentState.LEAVING
            changed = agent.move(target, now)
        case _:
            assert_never(action)
    return snapshot.with_agent(changed)


def place(snapshot: JobSnapshot, rank: RankSnapshot, host: str) -> JobSnapshot:
    """Put a rank on a host, and give that host an agent if it has none yet."""
    placed = snapshot.with_rank(replace(rank, host=host))
    if host in placed.agents:
        return placed
    agents = [*placed.agents.values(), placed.hosts[host]]
    agents.sort(key=lambda agent: agent.order)
    return replace(placed, agents={agent.host: agent for agent in agents})


def record(snapshot: JobSnapshot, change: AgentChange, now: float) -> JobSnapshot:
    """Take in what happened to an agent."""
    agent = snapshot.agents[change.host]
    if change.agent_number != agent.agent_number or agent.state is AgentState.ABSENT:
        return snapshot  # an earlier agent, or one that was dismissed
    if agent.state is AgentState.LEAVING:
        if not isinstance(change, actions.AgentLost):
            return snapshot
        newest = max(agent.agent_number, change.newest)
        gone = agent.move(AgentState.ABSENT, agent.since)
        return snapshot.with_agent(replace(gone, agent_number=newest))
    match change:
        case actions.AgentConnected():
            # Silence until now was the connection's, so every deadline of its ranks starts again.
            connected = agent.move(AgentState.CONNECTED, now)
            for rank in snapshot.ranks_on(agent.host):
                if rank.is_alive:
                    anew = replace(rank.attempt, seen_at=now, progressed_at=now, stopped_at=None)
                    snapshot = snapshot.with_attempt(rank, anew)
            seen = replace(connected, seen_at=now, is_inherited=False, trouble=None)
            return snapshot.with_agent(seen)
        case actions.AgentDisconnected():
            return snapshot.with_agent(agent.move(AgentState.UNREACHABLE, now))
        case actions.AgentLost():
            return _lose(snapshot, agent, change, now)
    assert_never(change)


def wait(snapshot: JobSnapshot, waits: actions.AgentWaits, now: float) -> JobSnapshot:
    """Take in that an agent is still to be started: its deadlines count from then."""
    agent = snapshot.agents[waits.host]
    is_present = (agent.agent_number, agent.state) == (waits.agent_number, AgentState.STARTING)
    cause = Cause(reason=Reason.WAITING_FOR_SLOTS, message=waits.message)
    waiting = replace(agent, since=now, seen_at=now, trouble=cause)
    return snapshot.with_agent(waiting) if is_present else snapshot


def note_working(snapshot: JobSnapshot, rank: RankSnapshot) -> JobSnapshot:
    """An agent with a running rank works; the agents lost before it do not count any more."""
    agent = snapshot.agent_of(rank)
    logs = agent.logs.move(RequestState.NONE)  # it has more of them from now on
    if not agent.failures and logs is agent.logs:
        return snapshot
    return snapshot.with_agent(replace(agent, failures=0, logs=logs))


def shift_deadlines(
    snapshot: JobSnapshot, seconds: float, now: float, host: str | None = None
) -> JobSnapshot:
    """Shift the deadlines of ranks by the time in which they could not report; None: of all."""
    ranks = tuple(
        fold_rank.shift_deadlines(rank, seconds, now) if host in {None, rank.host} else rank
        for rank in snapshot.ranks
    )
    return replace(snapshot, ranks=ranks)


def note_stall(
    snapshot: JobSnapshot, seconds: float, now: float, stalled: str | None = None
) -> JobSnapshot:
    """Shift all deadlines, or those of one host, by the time in which it could not report."""
    snapshot = shift_deadlines(snapshot, seconds, now, stalled)
    for agent in snapshot.agents.values():
        if stalled in {None, agent.host}:
            since, seen_at = (min(now, at + seconds) for at in (agent.since, agent.seen_at))
            snapshot = snapshot.with_agent(replace(agent, since=since, seen_at=seen_at))
    return snapshot


def note_starved(snapshot: JobSnapshot, starved: actions.AgentStarved, now: float) -> JobSnapshot:
    """Shift the deadlines of a host whose agent could run, but got no processor."""
    agent, seconds = snapshot.agents[starved.host], snapshot.forgivable(starved.seconds)
    new_seconds = seconds - agent.starved_seconds
    if new_seconds <= 0 or starved.agent_number != agent.agent_number or snapshot.end.is_forced:
        return snapshot
    snapshot = snapshot.with_agent(replace(agent, starved_seconds=seconds))
    return _note_overload(note_stall(snapshot, new_seconds, now, agent.host), seconds)


def _note_overload(snapshot: JobSnapshot, starved_seconds: float) -> JobSnapshot:
    is_overload = starved_seconds >= snapshot.spec.heartbeat_timeout
    return replace(snapshot, is_overloaded=snapshot.is_overloaded or is_overload)


def record_heartbeat(
    snapshot: JobSnapshot, host: str, beat: AgentHeartbeat, now: float
) -> JobSnapshot:
    """Shift the deadlines of an agent's ranks by the time in which it, or they, did not run."""
    agent = snapshot.agents[host]
    # What the coordinator has seen of that already was taken from its deadlines.
    late_seconds = beat.late_seconds - agent.starved_seconds
    silent_seconds = max(now - snapshot.fresh_until(agent), late_seconds)
    if silent_seconds > 0:
        snapshot = shift_deadlines(snapshot, silent_seconds, now, agent.host)
    stopped, starved = set(beat.stopped), {one[:2]: one[2] for one in beat.starved}
    for rank in snapshot.ranks_on(agent.host):
        seconds = snapshot.forgivable(starved.get((rank.rank, rank.attempt.number), 0.0))
        if rank.is_alive and seconds > rank.attempt.starved_seconds:
            # A moment in which neither of them ran counts once.
            new_seconds = max(0.0, seconds - rank.attempt.starved_seconds - silent_seconds)
            shifted = fold_rank.shift_deadlines(rank, new_seconds, now)
            rank = replace(shifted, attempt=replace(shifted.attempt, starved_seconds=seconds))  # noqa: PLW2901
            snapshot = _note_overload(snapshot.with_rank(rank), seconds)
        is_stopped = rank.is_alive and (rank.rank, rank.attempt.number) in stopped
        if is_stopped != (rank.attempt.stopped_at is not None):
            changed = replace(rank.attempt, stopped_at=now if is_stopped else None)
            snapshot = snapshot.with_attempt(rank, changed)
    return snapshot.with_agent(replace(agent, seen_at=now, starved_seconds=0.0))


def _lose(
    snapshot: JobSnapshot, agent: AgentSnapshot, lost: actions.AgentLost, now: float
) -> JobSnapshot:
    """Ranks wait for the next agent or are gone. That is not their failure and not a restart."""
    # If another coordinator numbers agents now, it holds our lease: this is never committed.
    agent = replace(agent, agent_number=max(agent.agent_number, lost.newest))
    if not agent.is_local:
        trouble = Cause(reason=Reason.AGENT_LOST, message=lost.message)
        agent = replace(agent, trouble=trouble)
    all_hosts = {**snapshot.hosts, **snapshot.agents}
    allowed = {*(snapshot.spec.hosts or all_hosts), agent.host}
    fewest = min(all_hosts[host].failures for host in allowed if host in all_hosts)
    if isinstance(lost, actions.AgentNotStarted):
        # That is up to the host and not to the job, which waits for it as for one that is lost: it
        # has to stay below the limit when `_give_up` has counted this one, too.
        agent = replace(agent, failures=min(agent.failures, AGENT_FAILURES_LIMIT - 2))
    elif fewest >= AGENT_FAILURES_LIMIT:
        count = agent.failures + 1
        message = f"{count} agents in a row were lost before a rank came alive: {lost.message}"
        failure = JobFailure(reason=Reason.AGENT_LOST, message=message)
        snapshot = snapshot.fail(failure, now)
    gone = [
        rank.rank
        for rank in snapshot.ranks_on(agent.host)
        # Before a rank has a process, the failure counts for the agent alone.
        if rank.attempt.identity is not None and rank.rank not in lost.living
    ]
    snapshot = _give_up(snapshot, agent, AGENT_LOST, now, lost.living)
    for number in gone:
        snapshot = fold_exit.count_end_with_agent(snapshot, snapshot.ranks[number], now)
    return snapshot


def _give_up(
    snapshot: JobSnapshot,
    agent: AgentSnapshot,
    cause: Cause,
    now: float,
    living: Collection[int] = (),
) -> JobSnapshot:
    """Return the job without this agent: ranks that live wait for the next one, others are gone."""
    pause = 0.0  # the first loss after a working agent is repaired at once
    is_given_up = cause.reason is Reason.HOST_LOST
    # A lost host is set aside for a moment, in which its ranks get another one.
    if failures := agent.failures + is_given_up:
        pause = snapshot.backoff.delay_seconds(failures, f"{snapshot.uid}/agent")
    if is_given_up and snapshot.partition is not None and agent.host in snapshot.partition.hosts:
        pause = max(pause, CUT_PAUSE_SECONDS)
    absent = replace(
        agent.move(AgentState.ABSENT, agent.since),
        failures=agent.failures + 1,
        start_at=now + pause,
    )
    ending = classify_unobserved(snapshot, cause)
    on_host = snapshot.ranks_on(agent.host)
    snapshot = snapshot.with_agent(absent)
    for rank in on_host:
        is_living = rank.rank in living
        left = fold_rank.orphan(rank, now) if is_living else fold_rank.end_unobserved(rank, ending)
        snapshot = snapshot.with_rank(left)
    snapshot = fold_pool.release_others(snapshot)
    alive = {rank.attempt.worker_id for rank in snapshot.ranks if rank.is_alive}
    snapshot = replace(snapshot, pool=fold_pool.keep_living(snapshot.pool, alive))
    if {rank.attempt.worker_id for rank in on_host} & {*snapshot.group.workers}:
        # The next agent creates new shared memory, which takes another group round.
        snapshot = replace(snapshot, group=GroupSnapshot(round=snapshot.group.round))
    return snapshot
