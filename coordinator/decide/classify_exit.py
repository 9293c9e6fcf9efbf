"""Which retry class the end of an attempt belongs to, and the words for it. Pure; rules in order.

Our own actions come before what the process reported, and that before its exit status.
"""

import re
from collections.abc import Sequence
from signal import SIGKILL, SIGTERM
from typing import Final

from coordinator.decide.events import describe_exit, error_lines, excerpt, last_line, quote_end
from coordinator.decide.state.job import JobSnapshot
from coordinator.decide.state.rank import AttemptEnd, Cause, RankSnapshot
from muster.contracts.job import Reason
from muster.contracts.messages import RankExited
from muster.contracts.retry import DO_NOT_RETRY_CODE, SIGNAL_BASE, RetryClass

_HANGS: Final = frozenset({Reason.HEARTBEAT_TIMEOUT, Reason.NO_PROGRESS, Reason.START_TIMEOUT})

_MISTAKES: Final = re.compile(r"(Syntax|Indentation|Name|Import|ModuleNotFound)Error(:|$)")
_LASTING: Final = re.compile(r"(FileNotFound|NotADirectory|Key|Type|Attribute)Error(:|$)")
"""A missing path or key, or a wrong argument: errors that time alone does not cure."""

_TORCH_PREFIX: Final = re.compile(r"^\[rank\d+\]: ")
"""Before each line of a traceback once a process group is there."""

_LOST_PEER: Final = re.compile(
    r"closed by (the )?(remote )?peer|connection (was )?(closed|reset|refused|aborted)|broken pipe"
    r"|Connection\w*Error|BrokenPipeError|Dist\w*Error|remote process|tim(ed|ing) ?out|timeout"
    r"|SIGTERM|signal:? 15",
    re.IGNORECASE,
)
"""What ranks say that wait for one that is gone, or that were asked to exit because of it."""

_USAGE_CODE: Final = 2  # argparse: ``train.py: error: unrecognized arguments: --lrr``

_REASONS: Final = {
    RetryClass.CRASH: Reason.WORKER_EXITED,
    RetryClass.KILLED: Reason.WORKER_EXITED,
    RetryClass.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    RetryClass.PREEMPTION: Reason.PREEMPTED,
    RetryClass.INFRASTRUCTURE: Reason.AGENT_LOST,
    RetryClass.DO_NOT_RETRY: Reason.DO_NOT_RETRY,
}
"""Of the classes that follow from the exit status."""


def classify(
    snapshot: JobSnapshot, rank: RankSnapshot, exited: RankExited, cause: Cause | None
) -> AttemptEnd:
    """Return how the attempt of `rank` ended; the rank has its exit status already.

    `cause` is why we, or the other ranks, wanted it to end, if so.
    """
    kind = _retry_class(snapshot, rank, exited, cause)
    if kind is RetryClass.INVALID_PROGRAM:
        cause = rank.attempt.refused
    if cause is not None:
        return AttemptEnd(retry_class=kind, reason=cause.reason, message=cause.message)
    if exited.unstarted is not None and kind is RetryClass.INFRASTRUCTURE:
        words = excerpt(exited.unstarted)
        return AttemptEnd(retry_class=kind, reason=Reason.HOST_EXHAUSTED, message=words)
    reason = _REASONS.get(kind)
    if kind is RetryClass.STOPPED:
        broken = Reason.GANG_RESTARTED if snapshot.is_gang_broken else None
        reason = snapshot.end.reason or broken
    error, before = _error_line(exited), rank.ending
    error = error if exited.exit_code and _LASTING.match(error) else ""
    earlier = before.error_hosts if before and before.error == error else ()
    return AttemptEnd(
        retry_class=kind,
        reason=reason,
        message=_describe(kind, snapshot, rank, exited),
        is_mistake=is_mistake(exited),
        is_raised=rank.attempt.raised is not None,
        error=error,
        error_hosts=(*earlier, rank.host) if error else (),
    )


def classify_unobserved(snapshot: JobSnapshot, cause: Cause) -> AttemptEnd:
    """Return how an attempt ended whose agent went with it, so that its status is unknown."""
    if snapshot.is_ending:
        kind, reason = RetryClass.STOPPED, snapshot.end.reason
    else:
        kind, reason = RetryClass.INFRASTRUCTURE, cause.reason
    return AttemptEnd(retry_class=kind, reason=reason, message=cause.message)


def _retry_class(  # noqa: PLR0911  one return for each class
    snapshot: JobSnapshot, rank: RankSnapshot, exited: RankExited, cause: Cause | None
) -> RetryClass:
    intent = rank.attempt.intent
    if rank.finished:
        return RetryClass.FINISHED
    if rank.attempt.refused is not None:
        return RetryClass.INVALID_PROGRAM
    is_gang_over = snapshot.is_ending or snapshot.is_gang_broken
    if is_gang_over or not rank.in_service or intent.terminated_at is not None:
        return RetryClass.STOPPED
    if cause is not None:
        return RetryClass.HANG if cause.reason in _HANGS else RetryClass.CRASH
    if _is_unobserved(exited):
        return RetryClass.INFRASTRUCTURE
    if exited.exit_code == DO_NOT_RETRY_CODE:
        return RetryClass.DO_NOT_RETRY
    if intent.orphaned_by is not None:
        return RetryClass.INFRASTRUCTURE
    # A shell or a container whose program was killed by signal n exits with 128 + n.
    if intent.stopping or exited.signal == SIGTERM or exited.exit_code == SIGNAL_BASE + SIGTERM:
        return RetryClass.PREEMPTION
    if _lacked_memory(exited):
        return RetryClass.OUT_OF_MEMORY
    return RetryClass.KILLED if exited.signal == SIGKILL else RetryClass.CRASH


def _is_unobserved(exited: RankExited) -> bool:
    """True if the process ended without an agent, or was never started."""
    return exited.exit_code is None and exited.signal is None


def _lacked_memory(exited: RankExited) -> bool:
    """True if there is evidence: a SIGKILL alone can come from anywhere."""
    # numpy and torch raise MemoryError types of their own.
    error = _error_line(exited).partition(":")[0]
    return exited.out_of_memory or (error.endswith("MemoryError") and " " not in error)


def is_mistake(exited: RankExited) -> bool:
    """True if the last words of a Python program name a mistake in its text or its arguments."""
    line = last_line(exited.last_lines)
    is_usage = exited.exit_code == _USAGE_CODE and ": error: " in line
    is_unknown_module = exited.exit_code == 1 and ": No module named " in line  # python -m
    is_error = exited.exit_code and _MISTAKES.match(_error_line(exited))
    return is_usage or is_unknown_module or bool(is_error)


def failed_before(rank: RankSnapshot, one: RankExited, other: RankExited, *, is_near: bool) -> bool:
    """Return whether `one`, of `rank`, failed before `other`, of the same start of a gang.

    `is_near`: both ran on one host, so that the times in their logs can be compared. Else, or if
    both times are the same, an error that only says that a peer is gone came later.
    """
    is_asked = one.signal in {None, SIGTERM} or rank.attempt.intent.kill is not None
    if is_asked and one.error_at is None:
        return False
    if is_near and one.error_at and other.error_at and one.error_at != other.error_at:
        return one.error_at < other.error_at
    return has_lost_peer(other) and not has_lost_peer(one)


def has_lost_peer(exited: RankExited) -> bool:
    """True if the last error of a program says that another rank is gone, or does not answer."""
    errors = _first_error_line(exited) or error_lines(exited.last_lines)
    return bool(_LOST_PEER.search(last_line(errors)))


def _error_line(exited: RankExited) -> str:
    line = last_line(_first_error_line(exited) or error_lines(exited.last_lines))
    return _TORCH_PREFIX.sub("", line)


def _first_error_line(exited: RankExited) -> Sequence[str]:
    """Return the first line of the error report that the program wrote, if any."""
    return [] if exited.error is None else excerpt(exited.error).splitlines()[:1]


def _describe(
    kind: RetryClass, snapshot: JobSnapshot, rank: RankSnapshot, exited: RankExited
) -> str:
    """Return a verb phrase, with the end of the log if that says why."""
    end, intent = describe_exit(rank.attempt), rank.attempt.intent
    if kind is RetryClass.STOPPED and snapshot.is_gang_broken and not snapshot.is_ending:
        lost = (one.rank for one in snapshot.ranks if one.is_down and one.trouble is not None)
        first = next((f"rank {number}" for number in lost), "another rank")
        end = f"{end}, as {first} was lost"
    # A program that exits logs why in its last line; one that a signal kills logs no reason.
    words = error_lines(exited.last_lines) if exited.signal is None else ()
    last_words = _first_error_line(exited) or words
    quote = quote_end(last_words)
    asked_by = intent.orphaned_by or ("another process" if intent.stopping else None)
    match kind:
        case RetryClass.INFRASTRUCTURE if _is_unobserved(exited):
            return "ended while it had no agent, so its exit status is unknown"
        case RetryClass.INFRASTRUCTURE | RetryClass.PREEMPTION if asked_by is not None:
            has_told = rank.attempt.has_told_step
            is_saved = has_told and snapshot.durable_step(rank) == rank.progress.step
            also = "saved its work" if is_saved and exited.exit_code == 0 else end
            return f"was asked to stop by {asked_by} and {also}"
        case RetryClass.PREEMPTION:
            return f"{end} sent by another process{quote}"
        case RetryClass.OUT_OF_MEMORY:
            return f"{end} for lack of memory{quote}"
        case RetryClass.DO_NOT_RETRY:
            return f"{end}, so it is not to be started again{quote}"
        case RetryClass.CRASH if exited.exit_code == SIGNAL_BASE + SIGKILL:
            return f"{end}, as a shell or a container does whose program was killed{quote}"
        case RetryClass.CRASH if exited.exit_code == 0:
            return f"{end} before its training was over{quote}"
        case _:
            return end + quote
