"""Which ranks and agents are silent for too long. Pure, like all of `plan`.

Messages of ranks come through their agent, so the agent is judged first: silence of a rank counts
only while its agent was not silent. A silent agent is replaced; its ranks run on.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from coordinator.decide.actions import Action, KillProcess, ReportSlowExit, Suspect
from coordinator.decide.plan_pool import is_step_expected
from coordinator.decide.state.job import AgentSnapshot, JobSnapshot
from coordinator.decide.state.rank import NEVER, Attempt, Cause, RankSnapshot
from muster.contracts.agent import AgentState
from muster.contracts.job.status import JobStatus, Reason
from muster.contracts.rank import ProcessState

SUSPECT_SHARE: Final = 0.5
"""Share of the heartbeat timeout after which a rank without a heartbeat becomes a suspect."""

AGENT_CONNECT_SECONDS: Final = 30.0
"""An agent imports little and connects, or reconnects, at once; one that takes longer is broken."""

LISTING_SECONDS: Final = 240.0
"""An agent asks a store that is away for half of it."""

AGENT_LATE_SECONDS: Final = 10.0
"""A job that has waited so long for its agent to connect says so; a busy machine takes a few."""

AGENT_SILENCE_SECONDS: Final = 10.0
"""Least silence before an agent is replaced, even for a shorter heartbeat timeout.

It may wait for the imports of its prefork server. Ranks run on meanwhile, so nothing is lost.
"""

FORCED_STOP_SECONDS: Final = 3.0
"""Silence of an agent that a forced stop tolerates; agents pulse every second."""

KILL_GRACE_SECONDS: Final = 10.0
"""An agent kills at once and reports within its containment time; one that takes longer hangs."""

HOST_SILENCE_SECONDS: Final = 10.0
"""Silence after which a host is left out by ranks that train together: their group fences it."""

FORMER_HOST_SECONDS: Final = 2.0
"""The same for the host of a coordinator that this machine has succeeded: it is silent already."""

HOST_LEASE_SECONDS: Final = 30.0
"""Silence after which any other ranks of a host are started elsewhere.

Its agent has killed them by then, so two copies never count: `REMOTE_ORPHAN_SECONDS` and then
`REMOTE_GRACE_SECONDS` (`muster.cluster.requests`) after it sent the last heartbeat that was
answered, whether its machine was suspended meanwhile or not.
"""

NEVER_DUE: Final = float("inf")


def agent_deadline(
    snapshot: JobSnapshot, agent: AgentSnapshot, ranks: Sequence[RankSnapshot]
) -> float:
    """Return when an agent that does not respond is killed; its `ranks` wait for the next one."""
    if agent.state is AgentState.LEAVING:
        return NEVER_DUE  # its dismissal ends it
    listed = agent.listing.since + LISTING_SECONDS if agent.listing.is_open else NEVER_DUE
    return min(listed, _answer_deadline(snapshot, agent, ranks))


def _answer_deadline(
    snapshot: JobSnapshot, agent: AgentSnapshot, ranks: Sequence[RankSnapshot]
) -> float:
    if not agent.is_connected:
        grace = FORCED_STOP_SECONDS if snapshot.end.is_forced else AGENT_CONNECT_SECONDS
        return agent.since + grace
    intents = (rank.attempt.intent for rank in ranks if rank.is_alive)
    killed_at = min((intent.killed_at for intent in intents if intent.kill), default=NEVER_DUE)
    # Both counts begin no earlier than when the agent connected, or was last killed.
    obeyed = max(agent.since, killed_at)
    seen = max(agent.since, agent.seen_at)
    silence = max(AGENT_SILENCE_SECONDS, snapshot.spec.heartbeat_timeout)
    if snapshot.end.is_forced:
        silence = FORCED_STOP_SECONDS
    return min(obeyed + KILL_GRACE_SECONDS, seen + silence)


def host_deadline(
    snapshot: JobSnapshot, agent: AgentSnapshot, ranks: Sequence[RankSnapshot]
) -> float:
    """Return when a host is given up: no process of another machine is known to be gone."""
    if agent.is_local:
        return NEVER_DUE
    has_ranks = any(rank.is_alive for rank in ranks)
    if agent.state is AgentState.ABSENT and not has_ranks:
        return NEVER_DUE
    is_fenced = snapshot.is_synchronous and has_ranks
    return agent.seen_at + (HOST_SILENCE_SECONDS if is_fenced else HOST_LEASE_SECONDS)


def agent_late_at(snapshot: JobSnapshot) -> float:
    """Return when a starting job reports that an agent is late, also while that is replaced."""
    missing = [agent for agent in snapshot.agents.values() if not agent.is_connected]
    if snapshot.status is not JobStatus.STARTING or not missing:
        return NEVER_DUE
    if snapshot.reason is Reason.AGENT_LOST:
        return NEVER
    since = (agent.since for agent in missing if agent.is_wanted)
    return min(since, default=NEVER_DUE) + AGENT_LATE_SECONDS


def judge_silent_rank(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> Iterator[Action]:
    """Yield actions for a rank that does not start, beat, take a step or exit in time."""
    agent = snapshot.agent_of(rank)
    if not agent.is_connected or not rank.is_alive or rank.attempt.intent.kill is not None:
        return
    judge = _judge_exit if rank.is_exiting else _judge
    yield from judge(snapshot, rank, min(now, snapshot.fresh_until(agent)))


def silence_deadlines(snapshot: JobSnapshot, rank: RankSnapshot) -> Iterator[float]:
    """Yield when a living rank has to be judged again if it stays silent."""
    spec, attempt = snapshot.spec, rank.attempt
    if rank.is_exiting:
        yield exit_deadline(snapshot, rank)
        yield attempt.exiting_at + spec.heartbeat_timeout
        return
    if attempt.process is ProcessState.SPAWNED:
        yield attempt.spawned_at + spec.start_grace_seconds
    if attempt.sends_heartbeats:
        yield attempt.seen_at + SUSPECT_SHARE * spec.heartbeat_timeout
    yield _silent_since(attempt) + spec.heartbeat_timeout


def exit_deadline(snapshot: JobSnapshot, rank: RankSnapshot) -> float:
    """Return when a process that exits is killed.

    One that was asked to exit has what is left of its grace, though not less than a silent rank
    has: it may have saved for longer.
    """
    spec, attempt = snapshot.spec, rank.attempt
    asked_at = attempt.intent.asked_at if rank.in_service else attempt.exiting_at
    if asked_at == NEVER:
        return attempt.exiting_at + spec.exit_grace_seconds
    least = attempt.exiting_at + spec.heartbeat_timeout
    return max(least, asked_at + spec.stop_grace_seconds)


def _judge_exit(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> Iterator[Action]:
    attempt, deadline = rank.attempt, exit_deadline(snapshot, rank)
    if now >= deadline:
        seconds = f"{deadline - attempt.exiting_at:.0f} s"
        message = f"did not exit within {seconds} and was killed"
        if rank.finished:
            message += "; it had finished, so nothing is lost"
        yield _kill(rank, Reason.HEARTBEAT_TIMEOUT, message)
    elif not attempt.is_slow_exit and now >= attempt.exiting_at + snapshot.spec.heartbeat_timeout:
        is_free = rank.in_service and attempt.intent.asked_at == NEVER
        yield ReportSlowExit(
            rank=rank.rank,
            limit_seconds=deadline - attempt.exiting_at,
            limit="exit_grace_seconds" if is_free else "stop_grace_seconds",
        )


def _judge(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> Iterator[Action]:
    spec, attempt = snapshot.spec, rank.attempt
    start_by = attempt.spawned_at + spec.start_grace_seconds
    if attempt.process is ProcessState.SPAWNED and now >= start_by:
        message = f"gave no sign of life within {spec.start_grace_seconds:g} s and was killed"
        yield _kill(rank, Reason.START_TIMEOUT, message)
    elif now >= _silent_since(attempt) + spec.heartbeat_timeout:
        what = "sent no heartbeat" if attempt.sends_heartbeats else "was stopped (SIGSTOP)"
        message = f"{what} for {spec.heartbeat_timeout:g} s and was killed"
        yield _kill(rank, Reason.HEARTBEAT_TIMEOUT, message)
    elif _is_stuck(snapshot, rank):
        is_starting = snapshot.is_synchronous and attempt.member.ready is None
        what = "was not ready to train" if is_starting else "took no step"
        seconds = _step_timeout(snapshot, rank)
        message = f"sent heartbeats but {what} for {seconds:g} s and was killed"
        yield _kill(rank, Reason.NO_PROGRESS, message)
    elif (
        attempt.sends_heartbeats
        and attempt.process is ProcessState.LIVE
        and now >= attempt.seen_at + SUSPECT_SHARE * spec.heartbeat_timeout
    ):
        yield Suspect(rank=rank.rank)


def _kill(rank: RankSnapshot, reason: Reason, message: str) -> Action:
    return KillProcess(rank=rank.rank, cause=Cause(reason=reason, message=message))


def _silent_since(attempt: Attempt) -> float:
    """Return the time of the last sign of life: a heartbeat, or that the process runs at all.

    A program that has never sent a heartbeat may never do so: only being stopped counts.
    """
    if attempt.sends_heartbeats:
        return attempt.seen_at
    return NEVER_DUE if attempt.stopped_at is None else attempt.stopped_at


def _is_stuck(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """True if a heartbeat that came after the step timeout still reports no progress.

    Silence does not count here: the next heartbeat may report a step, or that the rank waits.
    """
    attempt = rank.attempt
    if not attempt.sends_heartbeats or not is_step_expected(snapshot, rank):
        return False
    return attempt.seen_at >= attempt.progressed_at + _step_timeout(snapshot, rank)


def _step_timeout(snapshot: JobSnapshot, rank: RankSnapshot) -> float:
    """Return how long a rank may take for a step, or to become ready in a synchronous job."""
    spec = snapshot.spec
    if spec.progress_timeout_seconds is None:
        return NEVER_DUE
    if snapshot.is_synchronous and rank.attempt.member.ready is None:
        return max(spec.progress_timeout_seconds, spec.start_grace_seconds)
    return spec.progress_timeout_seconds
