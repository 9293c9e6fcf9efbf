"""Which class the end of an incarnation belongs to, and the words for it. Pure; rules in order.

What we did ourselves comes before what the process said, and that before what its end looks like.
"""

from collections.abc import Sequence
from typing import Final

from coordinator.snapshot import Cause, Ending, JobSnapshot, RankSnapshot
from coordinator.wording import describe_exit, last_line, legible, name_lost, quote_end
from muster.contracts.endings import DO_NOT_RETRY_CODE, OF_A_SHELL, RetryClass
from muster.contracts.job import Reason
from muster.contracts.messages import RankExited

SIGKILL: Final = 9
SIGTERM: Final = 15

_HANGS: Final = frozenset({Reason.HEARTBEAT_TIMEOUT, Reason.NO_PROGRESS, Reason.START_TIMEOUT})

_REASONS: Final = {
    RetryClass.CRASH: Reason.WORKER_EXITED,
    RetryClass.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    RetryClass.PREEMPTION: Reason.PREEMPTED,
    RetryClass.INFRASTRUCTURE: Reason.AGENT_LOST,
    RetryClass.DO_NOT_RETRY: Reason.DO_NOT_RETRY,
}
"""Of the classes that are known by how the process ended."""


def ending_of(
    snapshot: JobSnapshot, rank: RankSnapshot, exited: RankExited, cause: Cause | None
) -> Ending:
    """Return how the process of `rank` ended, which knows its exit code already.

    `cause` is why we, or the other ranks, wanted that end, if anybody did.
    """
    kind = _class_of(snapshot, rank, exited, cause)
    if kind is RetryClass.INVALID_PROGRAM:
        cause = rank.refused
    if cause is not None:
        return Ending(retry_class=kind, reason=cause.reason, message=cause.message)
    if exited.unstarted is not None and kind is RetryClass.INFRASTRUCTURE:
        words = legible(exited.unstarted)
        return Ending(retry_class=kind, reason=Reason.HOST_EXHAUSTED, message=words)
    reason = _REASONS.get(kind) if kind is not RetryClass.STOPPED else _why_it_ends(snapshot)
    return Ending(retry_class=kind, reason=reason, message=_words(kind, snapshot, rank, exited))


def ending_unseen(snapshot: JobSnapshot, cause: Cause) -> Ending:
    """Return how a process ended that went with its agent, and could not be asked."""
    if snapshot.is_ending:
        kind, reason = RetryClass.STOPPED, _why_it_ends(snapshot)
    else:
        kind, reason = RetryClass.INFRASTRUCTURE, cause.reason
    return Ending(retry_class=kind, reason=reason, message=cause.message)


def _class_of(
    snapshot: JobSnapshot, rank: RankSnapshot, exited: RankExited, cause: Cause | None
) -> RetryClass:
    if rank.finished:
        return RetryClass.FINISHED
    if rank.refused is not None:
        return RetryClass.INVALID_PROGRAM
    if snapshot.is_ending or snapshot.is_broken or not rank.in_service or rank.terminated:
        return RetryClass.STOPPED
    if cause is not None:
        return RetryClass.HANG if cause.reason in _HANGS else RetryClass.CRASH
    return _class_by_itself(rank, exited)


def _class_by_itself(rank: RankSnapshot, exited: RankExited) -> RetryClass:
    """Return the class of an end that no coordinator had wanted."""
    if _is_unseen(exited):
        return RetryClass.INFRASTRUCTURE
    if exited.exit_code == DO_NOT_RETRY_CODE:
        return RetryClass.DO_NOT_RETRY
    if rank.orphaned_by is not None:
        return RetryClass.INFRASTRUCTURE
    if rank.stopping or _ended_by(SIGTERM, exited):
        return RetryClass.PREEMPTION
    return RetryClass.OUT_OF_MEMORY if _lacked_memory(exited) else RetryClass.CRASH


def _is_unseen(exited: RankExited) -> bool:
    """Whether it ended while it had no agent, and the next one finds it gone; or never began."""
    return exited.exit_code is None and exited.signal is None


def _ended_by(number: int, exited: RankExited) -> bool:
    """Whether a signal ended it, or the program that a shell or a container ran for it."""
    return exited.signal == number or exited.exit_code == OF_A_SHELL + number


def _lacked_memory(exited: RankExited) -> bool:
    """Whether there is evidence; a SIGKILL alone may be anybody's."""
    return exited.out_of_memory or _names_memory(_own_account(exited) or exited.last_lines)


def _names_memory(last_lines: Sequence[str]) -> bool:
    """Whether a traceback ended in a MemoryError, perhaps of numpy's or torch's own kind."""
    error, _, _ = last_line(last_lines).partition(":")
    return error.endswith("MemoryError") and " " not in error


def _last_words(exited: RankExited) -> Sequence[str]:
    """Return what a program has said of its end: its own account of it, or its log."""
    # What a program says last before it gives up is why; before a signal it knew of nothing.
    return _own_account(exited) or (exited.last_lines if exited.signal is None else ())


def _own_account(exited: RankExited) -> Sequence[str]:
    """Return the first line of what it has written down of its error."""
    return [] if exited.error is None else legible(exited.error).splitlines()[:1]


def _why_it_ends(snapshot: JobSnapshot) -> Reason | None:
    """Return why all ranks are ended; None if only this one was to go."""
    if snapshot.verdict is not None:
        return snapshot.verdict.reason
    if snapshot.stop is not None:
        return Reason.STOPPED_BY_USER
    if snapshot.interrupting:
        return Reason.INTERRUPTED
    return Reason.GANG_RESTARTED if snapshot.is_broken else None


def _words(kind: RetryClass, snapshot: JobSnapshot, rank: RankSnapshot, exited: RankExited) -> str:
    """Return a verb phrase, with the end of the log where that says why."""
    end = describe_exit(rank)
    if kind is RetryClass.STOPPED and snapshot.is_broken and not snapshot.is_ending:
        end = f"{end}, as {name_lost(snapshot)} was lost"
    quote = quote_end(_last_words(exited))
    asked_by = rank.orphaned_by or ("somebody else" if rank.stopping else None)
    match kind:
        case RetryClass.INFRASTRUCTURE if _is_unseen(exited):
            return "ended while it had no agent, so that nobody saw how"
        case RetryClass.INFRASTRUCTURE | RetryClass.PREEMPTION if asked_by is not None:
            is_saved = exited.exit_code == 0 and _has_saved(snapshot, rank)
            also = "saved its work" if is_saved else end
            return f"was asked to stop by {asked_by} and {also}"
        case RetryClass.PREEMPTION:
            return f"{end}, which somebody else had sent{quote}"
        case RetryClass.OUT_OF_MEMORY:
            return f"{end} for lack of memory{quote}"
        case RetryClass.DO_NOT_RETRY:
            return f"{end}, so it is not to be started again{quote}"
        case RetryClass.CRASH if exited.exit_code == OF_A_SHELL + SIGKILL:
            return f"{end}, as a shell or a container does whose program was killed{quote}"
        case RetryClass.CRASH if exited.exit_code == 0:
            return f"{end} before its training was over{quote}"
        case _:
            return end + quote


def _has_saved(snapshot: JobSnapshot, rank: RankSnapshot) -> bool:
    """Whether all that this process is known to have done is in a checkpoint."""
    return rank.has_told_step and snapshot.durable_step(rank) == rank.step
