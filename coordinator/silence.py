"""Who is silent, and who is merely not heard. Pure, as all of `coordinator.plan`.

A rank is heard through its agent, so the agent is judged first: of a rank only that silence counts
which its agent was there to hear. An agent that is silent itself is replaced, and its ranks live.
"""

from collections.abc import Iterator

from coordinator.actions import Action, KillProcess, Suspect
from coordinator.pool_plan import is_to_step
from coordinator.snapshot import SUSPICION, AgentState, Cause, JobSnapshot, RankSnapshot
from muster.contracts.job import Reason
from muster.contracts.rank import ProcessState

AGENT_GRACE_SECONDS = 30.0
"""An agent imports little and connects at once, and comes back at once; one that has not by then
is broken."""

AGENT_SILENCE_SECONDS = 10.0
"""An agent may be silent at least so long, however impatient its job is: it may wait for its
template's imports. Nothing is lost by it, as ranks go on meanwhile."""

HURRY_SECONDS = 3.0
"""Where ranks are to be ended at once, so long for an agent that is not heard; it pulses each
second. Without it they are ended all the same."""

KILL_GRACE_SECONDS = 10.0
"""An agent sends SIGKILL at once and reports within its containment time; one that has not by then
hangs itself."""

NEVER_AGAIN = float("inf")


def agent_deadline(snapshot: JobSnapshot) -> float:
    """Return when an agent that does not do its part is given up; its ranks wait for the next."""
    if snapshot.agent is AgentState.LEAVING:
        return NEVER_AGAIN  # whoever sees it off ends it
    if snapshot.agent is not AgentState.CONNECTED:
        grace = HURRY_SECONDS if snapshot.ends_at_once else AGENT_GRACE_SECONDS
        return snapshot.agent_since + grace
    killed_at = [rank.killed_at for rank in snapshot.ranks if rank.is_alive and rank.kill]
    # Of both counts only what came after it joined, or was last killed.
    obeyed = max(snapshot.agent_since, min(killed_at, default=NEVER_AGAIN))
    heard = max(snapshot.agent_since, snapshot.agent_heard_at)
    patience = max(AGENT_SILENCE_SECONDS, snapshot.spec.heartbeat_timeout)
    if snapshot.ends_at_once:
        patience = HURRY_SECONDS
    return min(obeyed + KILL_GRACE_SECONDS, heard + patience)


def silent_ranks(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """Yield what is to be done about ranks that do not start, beat or step."""
    if snapshot.agent is not AgentState.CONNECTED:
        return  # silence is the connection's
    heard_until = min(now, snapshot.agent_vouches_until)
    for rank in snapshot.ranks:
        if rank.is_alive and rank.kill is None:
            yield from _judge(snapshot, rank, heard_until)


def _judge(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> Iterator[Action]:
    spec = snapshot.spec
    if rank.process is ProcessState.SPAWNED and now >= rank.spawned_at + spec.start_grace_seconds:
        yield KillProcess(rank=rank.rank, cause=_start_timeout(spec.start_grace_seconds))
    elif now >= _silent_since(rank) + spec.heartbeat_timeout:
        yield KillProcess(rank=rank.rank, cause=_heartbeat_timeout(rank, spec.heartbeat_timeout))
    elif _is_stuck(snapshot, rank):
        yield KillProcess(rank=rank.rank, cause=_no_progress(snapshot, rank))
    elif (
        rank.beats
        and rank.process is ProcessState.LIVE
        and now >= rank.heard_at + SUSPICION * spec.heartbeat_timeout
    ):
        yield Suspect(rank=rank.rank)


def _silent_since(rank: RankSnapshot) -> float:
    """Return since when nothing speaks for a rank: a beat, or that its process runs at all.

    A program that has never beaten may never do so, so its silence says nothing, and its standing
    still does.
    """
    if rank.beats:
        return rank.heard_at
    return NEVER_AGAIN if rank.stopped_at is None else rank.stopped_at


def _is_stuck(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """Whether a beat that came after all its time still tells of no progress.

    Silence says nothing here: the next beat may tell of a step, or that the rank waits for others.
    """
    limit = _time_for_a_step(snapshot, rank)
    if not rank.beats or not is_to_step(snapshot, rank):
        return False
    return rank.heard_at >= rank.progressed_at + limit


def _time_for_a_step(snapshot: JobSnapshot, rank: RankSnapshot) -> float:
    """Return how long a rank may work before it has to be further, or ready if it is not yet."""
    spec = snapshot.spec
    if spec.progress_timeout_seconds is None:
        return NEVER_AGAIN
    if snapshot.is_synchronous and rank.ready is None:
        return max(spec.progress_timeout_seconds, spec.start_grace_seconds)
    return spec.progress_timeout_seconds


def _start_timeout(seconds: float) -> Cause:
    return Cause(
        reason=Reason.START_TIMEOUT,
        message=f"gave no sign of life within {seconds:g} s and was killed",
    )


def _heartbeat_timeout(rank: RankSnapshot, seconds: float) -> Cause:
    what = "sent no heartbeat" if rank.beats else "stood still"
    return Cause(
        reason=Reason.HEARTBEAT_TIMEOUT, message=f"{what} for {seconds:g} s and was killed"
    )


def _no_progress(snapshot: JobSnapshot, rank: RankSnapshot) -> Cause:
    seconds = _time_for_a_step(snapshot, rank)
    is_starting = snapshot.is_synchronous and rank.ready is None
    what = "was not ready to train" if is_starting else "took no step"
    return Cause(
        reason=Reason.NO_PROGRESS, message=f"beat but {what} for {seconds:g} s and was killed"
    )


def moments_of_silence(snapshot: JobSnapshot, rank: RankSnapshot) -> Iterator[float]:
    """Yield when a living rank has to be judged again if nothing is heard of it."""
    spec = snapshot.spec
    if rank.process is ProcessState.SPAWNED:
        yield rank.spawned_at + spec.start_grace_seconds
    if rank.beats:
        yield rank.heard_at + SUSPICION * spec.heartbeat_timeout
    yield _silent_since(rank) + spec.heartbeat_timeout
