"""What happened → what is known, for the end of an incarnation. Pure, as `coordinator.fold`.

Each class of ends has a budget of its own for each rank (`muster.contracts.endings.RETRIES`), and
all that the program may be to blame for share one limit: ends in a row without a new checkpoint.
An end that nobody saw costs no restart, but is one of those: a program may have brought it about.
So is that of a process that its host could not start, which bounds how often it is tried. What we
have asked for ourselves is nobody's fault, however it ended, and counts nowhere. Nor does what ends
because its gang has lost another rank: the first one to end is to blame.
"""

from dataclasses import replace

from coordinator import pool_fold, rank_fold
from coordinator.classes import ending_of
from coordinator.snapshot import NEVER, Cause, Ending, JobSnapshot, RankSnapshot, Verdict
from coordinator.wording import describe_exit, legible, quote_lines
from muster.contracts.endings import OF_A_SHELL, RETRIES, RetryClass
from muster.contracts.job import Reason
from muster.contracts.messages import Raised, RankExited, Refused
from muster.contracts.spec import JobSpec


def condemned(snapshot: JobSnapshot, verdict: Verdict, now: float) -> JobSnapshot:
    """A job cannot go on. The first verdict stands; ranks have the job's grace to save and exit."""
    if snapshot.verdict is not None:
        return snapshot
    if snapshot.is_ending:  # their time runs already
        return replace(snapshot, verdict=verdict)
    grace = snapshot.spec.stop_grace_seconds
    return replace(snapshot, verdict=verdict, stop_at=now, stop_grace_seconds=grace)


def refused(snapshot: JobSnapshot, rank: RankSnapshot, message: Refused, now: float) -> JobSnapshot:
    """A rank says that starting it again would not help."""
    cause = Cause(reason=message.reason, message=legible(message.message))
    return _given_up(snapshot, rank, cause, now)


def raised(snapshot: JobSnapshot, rank: RankSnapshot, message: Raised, now: float) -> JobSnapshot:
    """The program raised an error; another process that met the same one proves that it will again.

    An agent that comes back tells of an incarnation's error once more, which proves nothing.
    """
    if rank.raised is not None:
        return snapshot
    before, by = snapshot.raised, snapshot.raised_by
    rank = replace(rank, raised=message)
    snapshot = replace(snapshot.with_rank(rank), raised=message, raised_by=rank.rank)
    if before != message:
        return snapshot
    other = "its process before this one" if by == rank.rank else f"rank {by}"
    words = f"{legible(message.message)}, and so did {other}"
    return _given_up(snapshot, rank, Cause(reason=Reason.INVALID_PROGRAM, message=words), now)


def _given_up(snapshot: JobSnapshot, rank: RankSnapshot, cause: Cause, now: float) -> JobSnapshot:
    verdict = Verdict(
        reason=cause.reason, message=f"rank {rank.rank}: {cause.message}", exit_code=1
    )
    return condemned(snapshot.with_rank(replace(rank, refused=cause)), verdict, now)


def exited(
    snapshot: JobSnapshot, rank: RankSnapshot, message: RankExited, now: float
) -> JobSnapshot:
    """The process of `rank` was reaped: it is done, comes back, or takes the job with it."""
    gone = pool_fold.judged(snapshot, rank_fold.exited(rank, message))
    cause = rank.kill or pool_fold.dispute(snapshot, rank)
    ending = ending_of(snapshot, gone, message, cause)
    gone = rank_fold.ended(gone, ending)
    snapshot = pool_fold.gone(snapshot, rank, gone, now)
    if not rank.in_service:
        return snapshot.with_rank(replace(gone, finished=False, trouble=None))
    if snapshot.is_ending or snapshot.is_broken or gone.finished:
        return snapshot.with_rank(gone)
    trouble = Cause(reason=ending.reason or Reason.WORKER_EXITED, message=ending.message)
    return _in_trouble(snapshot, replace(gone, trouble=trouble), ending, message, now)


def gone_with_its_agent(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> JobSnapshot:
    """A takeover has found that the process of `rank` is gone, as its agent is."""
    if snapshot.is_ending or not rank.in_service:
        return snapshot
    if rank.trouble is None or rank.is_asked_to_go:
        return snapshot
    counted = _with_its_progress(snapshot, rank, now)
    snapshot = snapshot.with_rank(counted)
    limit = _limit_reached(snapshot.spec, counted, RetryClass.INFRASTRUCTURE)
    if limit is None:
        return snapshot
    reason, words = limit
    message = f"rank {rank.rank} {rank.trouble.message} and {words}"
    return condemned(snapshot, Verdict(reason=reason, message=message, exit_code=1), now)


def _in_trouble(
    snapshot: JobSnapshot, rank: RankSnapshot, ending: Ending, message: RankExited, now: float
) -> JobSnapshot:
    """Schedule the next incarnation, at the expense of its class, or give the job up."""
    retry = RETRIES.get(ending.retry_class)
    is_restart = retry is not None and retry.is_restart
    is_unseen = ending.retry_class is RetryClass.INFRASTRUCTURE and not rank.is_asked_to_go
    if (is_restart or is_unseen) and rank.is_to_blame:
        rank = _with_its_progress(snapshot, rank, now)
    verdict = _verdict(snapshot, rank, ending, message)
    if verdict is not None:
        return condemned(snapshot.with_rank(rank), verdict, now)
    delayed = _delayed(snapshot, rank, now)
    return snapshot.with_rank(replace(delayed, restarts=rank.restarts + is_restart))


def _with_its_progress(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> RankSnapshot:
    """Return the rank with this end counted, or with all before it forgiven for a new checkpoint.

    Of a program that has never told of a checkpoint a while of life is as good as one.
    """
    durable = snapshot.durable_step(rank)
    if durable is None:
        is_fruitful = _healthy_seconds(rank, now) >= snapshot.backoff.reset_after_seconds
    else:
        is_fruitful = durable > rank.proven_step
    proven = rank.proven_step if durable is None else max(durable, rank.proven_step)
    return replace(rank, fruitless=0 if is_fruitful else rank.fruitless + 1, proven_step=proven)


def _delayed(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> RankSnapshot:
    """Return the rank with the time of its next start."""
    failures = 1 + snapshot.backoff.failures_after(rank.failures, _healthy_seconds(rank, now))
    delay = snapshot.backoff.delay_seconds(failures, f"{snapshot.uid}/{rank.rank}")
    return replace(rank, failures=failures, start_at=now + delay)


def _healthy_seconds(rank: RankSnapshot, now: float) -> float:
    return 0.0 if rank.live_at == NEVER else now - rank.live_at


def _verdict(
    snapshot: JobSnapshot, rank: RankSnapshot, ending: Ending, message: RankExited
) -> Verdict | None:
    """Return why the job is given up, if it is."""
    limit = _limit_reached(snapshot.spec, rank, ending.retry_class)
    if limit is None:
        return None
    reason, words = limit
    # Of an end with code 0 no lines are kept, and who never began has none.
    has_lines = message.exit_code != 0 and message.unstarted is None
    quote = quote_lines(message.last_lines) if has_lines else ""
    # A job that has failed has no code 0 itself.
    code = OF_A_SHELL + (message.signal or 0) if message.exit_code is None else message.exit_code
    told = f"rank {rank.rank} {_what_happened(rank, ending, message)} and {words}{quote}"
    return Verdict(reason=reason, message=told, exit_code=code or 1)


def _what_happened(rank: RankSnapshot, ending: Ending, message: RankExited) -> str:
    if rank.kill is not None:
        return rank.kill.message
    match ending.retry_class:
        case RetryClass.INFRASTRUCTURE:
            return ending.message
        case RetryClass.PREEMPTION if rank.stopping:
            return "was asked to stop by somebody else"
        case _:
            # The end of its log follows; what it has written down elsewhere does not.
            return describe_exit(rank) if message.error is None else ending.message


def _used_up(most: int) -> str:
    match most:
        case 0:
            return "may not be restarted"
        case 1:
            return "has used its one restart"
        case _:
            return f"has used its {most} restarts"


def _limit_reached(
    spec: JobSpec, rank: RankSnapshot, kind: RetryClass
) -> tuple[Reason, str] | None:
    """Return which limit forbids another start, in one word and in several."""
    if kind is RetryClass.DO_NOT_RETRY:
        return Reason.DO_NOT_RETRY, "is not to be started again"
    retry = RETRIES.get(kind)
    if retry is not None:
        most: int = getattr(spec, retry.budget)
        if rank.endings[kind] > most:
            return Reason.RESTART_LIMIT, f"{_used_up(most)}{retry.occasion}"
    if rank.fruitless >= spec.max_fruitless:
        words = f"has failed {rank.fruitless} times in a row without a new checkpoint"
        return Reason.NO_PROGRESS, words
    return None
