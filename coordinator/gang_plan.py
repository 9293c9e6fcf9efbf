"""What a gang needs: that all of its ranks run, or none. Rules of `coordinator.plan`.

Programs that meet once at MASTER_PORT cannot take in a newcomer. So when a rank has died the others
are ended, and then all are started again, those that were done included: in one plan, and so with
one port. Nothing of this is remembered: who lives, who is done and who is down says what is next.
"""

from collections.abc import Iterator
from typing import Final

from coordinator.actions import Action, KillProcess, Start, Terminate
from coordinator.snapshot import AgentState, Cause, JobSnapshot
from muster.contracts.job import Reason

_STUBBORN: Final = Cause(
    reason=Reason.GANG_RESTARTED,
    message="did not end within the grace period after its gang had lost a rank, and was killed",
)


def who_is_left_of_a_gang_ends(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """Ask the others to go, and do not wait for ever: they may hang in a group that is gone."""
    if not snapshot.is_broken or snapshot.is_ending or snapshot.agent is not AgentState.CONNECTED:
        return
    for rank in snapshot.ranks:
        if not rank.is_alive or rank.kill is not None:
            continue
        if not rank.terminated:
            yield Terminate(rank=rank.rank)
        elif now >= rank.terminated_at + snapshot.spec.stop_grace_seconds:
            yield KillProcess(rank=rank.rank, cause=_STUBBORN)


def gang_starts(snapshot: JobSnapshot, now: float) -> Iterator[Action]:
    """Start all of them, once none is left and the backoff of each is over."""
    if not snapshot.is_gang or snapshot.is_ending or snapshot.agent is not AgentState.CONNECTED:
        return
    is_down = not snapshot.any_alive and any(rank.is_down for rank in snapshot.ranks)
    if is_down and now >= max(rank.start_at for rank in snapshot.ranks):
        yield from (Start(rank=rank.rank) for rank in snapshot.ranks)


def moments_of_gang(snapshot: JobSnapshot) -> Iterator[float]:
    """Yield when those who were asked to go are not waited for any more."""
    if snapshot.is_broken:
        for rank in snapshot.ranks:
            if rank.is_alive and rank.terminated:
                yield rank.terminated_at + snapshot.spec.stop_grace_seconds
