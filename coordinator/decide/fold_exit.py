"""The part of `fold` that concerns the end of an attempt: restart, or failure of the job. Pure.

Each retry class has a restart budget per rank or gang (`muster.contracts.job.retry.RETRIES`). All
ends that the program may have caused share one more limit: failures in a row without progress, or
two at the beginning, if the program names a mistake in itself. An end that was not observed, or
a process that the host could not start, uses no restart but counts there. Ends that we asked for
count nowhere, nor do those of a gang that had lost another rank before, nor a wait for GPUs.
"""

import re
from dataclasses import replace
from itertools import chain
from signal import SIGTERM
from typing import Final

from coordinator.decide import fold_pool, fold_rank
from coordinator.decide.classify_exit import classify, failed_before, has_lost_peer
from coordinator.decide.events import describe_exit, excerpt, quote_lines
from coordinator.decide.state.job import JobSnapshot
from coordinator.decide.state.job_end import JobFailure
from coordinator.decide.state.rank import AttemptEnd, Cause, RankSnapshot
from muster.contracts.interpreter import import_advice
from muster.contracts.job.retry import RETRIES, SIGNAL_BASE, RetryClass
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import RankExited
from muster.contracts.messages.rank import PermanentFailure, Raised

MISTAKES_LIMIT: Final = 2
"""A job fails if so many of its first attempts fail and the last one names a mistake in itself.

Kills in between do not count as attempts (`JobSnapshot.count_attempts`)."""


_UNSET: Final = re.compile(r"^KeyError: '([A-Z][A-Z0-9_]+)'$", re.MULTILINE)
"""Of `os.environ`, most likely."""


def record_permanent_error(
    snapshot: JobSnapshot, rank: RankSnapshot, message: PermanentFailure, now: float
) -> JobSnapshot:
    """A rank reports an error that a restart cannot cure."""
    if not snapshot.is_needed(rank):
        return snapshot
    cause = Cause(reason=message.reason, message=excerpt(message.message))
    # Only once a step was taken is it known that some host has the data.
    is_of_data = message.is_of_data and snapshot.step > 0
    is_of_host = message.reason is Reason.DIFFERENT_BITS or is_of_data
    if not is_of_host or not snapshot.has_other_host(rank):
        return _fail_for_program(snapshot, rank, cause, now)
    host = snapshot.host_name(rank.host)
    refused = replace(cause, message=f"was refused on {host}: {cause.message}")
    return set_host_aside(snapshot, rank, refused)


def set_host_aside(snapshot: JobSnapshot, rank: RankSnapshot, refused: Cause) -> JobSnapshot:
    """Start no rank of this job on the host of `rank` any more."""
    changed = snapshot.with_agent(replace(snapshot.agent_of(rank), is_unfit=True))
    return changed.with_attempt(rank, replace(rank.attempt, refused=refused))


def record_error(
    snapshot: JobSnapshot, rank: RankSnapshot, message: Raised, now: float
) -> JobSnapshot:
    """The program raised an error; the same one in two processes proves that it will recur.

    An agent that reconnects repeats an attempt's error, which proves nothing.
    """
    if rank.attempt.raised is not None or not snapshot.is_needed(rank):
        return snapshot
    before, by = snapshot.raised, snapshot.raised_by
    rank = replace(rank, attempt=replace(rank.attempt, raised=message))
    snapshot = replace(snapshot.with_rank(rank), raised=message, raised_by=rank.rank)
    is_alike = before is not None and message.key != "" and before.key == message.key
    if before != message and not is_alike:
        return snapshot
    other = "its process before this one" if by == rank.rank else f"rank {by}"
    words = f"{excerpt(message.message)}, and so did {other}"
    cause = Cause(reason=Reason.INVALID_PROGRAM, message=words)
    return _fail_for_program(snapshot, rank, cause, now)


def _fail_for_program(
    snapshot: JobSnapshot, rank: RankSnapshot, cause: Cause, now: float
) -> JobSnapshot:
    message = f"{snapshot.rank_name(rank)}: {cause.message}"
    failure = JobFailure(reason=cause.reason, message=message)
    refused = replace(rank.attempt, refused=cause)
    return snapshot.with_attempt(rank, refused).fail(failure, now)


def end_attempt(
    snapshot: JobSnapshot, rank: RankSnapshot, message: RankExited, now: float
) -> JobSnapshot:
    """The process of `rank` was reaped: the rank is finished, restarts, or fails the job."""
    gone = fold_pool.confirm_finished(snapshot, fold_rank.record_exit(rank, message))
    cause = rank.attempt.intent.kill or fold_pool.divergence(snapshot, rank)
    ending = classify(snapshot, gone, message, cause)
    gone = fold_rank.count_end(gone, ending)
    snapshot = fold_pool.end_worker(snapshot, rank, gone, now)
    if not rank.in_service:
        return snapshot.with_rank(replace(gone, finished=False, trouble=None))
    if not snapshot.is_needed(rank):
        return snapshot.with_rank(replace(gone, finished=True, trouble=None))
    if snapshot.is_ending or snapshot.is_gang_broken or gone.finished:
        ended = _blame_earlier(snapshot.with_rank(gone), gone, ending, message)
    else:
        trouble = Cause(reason=ending.reason or Reason.WORKER_EXITED, message=ending.message)
        ended = _restart_or_fail(snapshot, replace(gone, trouble=trouble), ending, message, now)
    if ended.is_ending or not _is_hopeless(ended, ending.error):
        return ended
    words = "the last two attempts of every rank ended with this error"
    failure = _failure(ended, gone, ending, message, Reason.INVALID_PROGRAM, words)
    return ended.fail(failure, now)


def _is_hopeless(snapshot: JobSnapshot, error: str) -> bool:
    """Return whether no rank gets beyond an error that names a missing path or the like.

    One rank alone may wait for what another prepares, one host alone may lack the file, and a
    program that has worked may miss it for a moment.
    """
    ends = [rank.ending for rank in snapshot.in_service if rank.is_down and rank.ending]
    hosts = [end.error_hosts for end in ends if end.error == error and end.error_hosts[1:]]
    is_everywhere = {*chain(*hosts)} >= {*snapshot.agents}
    has_worked = snapshot.step or any(rank.budget.proven_step >= 0 for rank in snapshot.ranks)
    return len(hosts) == len(snapshot.in_service) and is_everywhere and not has_worked


def _blame_earlier(
    snapshot: JobSnapshot, rank: RankSnapshot, ending: AttemptEnd, message: RankExited
) -> JobSnapshot:
    """Let the failure of a gang name `rank` if it failed before the one that ended first.

    A rank whose peer is gone may exit before that one has.
    """
    failure = snapshot.end.failure
    if failure is None or failure.blamed is None:
        return snapshot
    is_near = snapshot.ranks[failure.blamed.rank].host == rank.host
    if not failed_before(rank, message, failure.blamed, is_near=is_near):
        return snapshot
    found = _failure(snapshot, rank, ending, message, failure.reason, failure.limit)
    return replace(snapshot, end=replace(snapshot.end, failure=found))


def _last_lines(spec: JobSpec, exited: RankExited) -> list[str]:
    """Return the end of the log, and what to do about a missing module or variable."""
    command = spec.command or ("",)
    python = command[0] if "/python" in command[0] else spec.python
    script = next((word for word in command if word.endswith(".py")), "")
    text = "\n".join(exited.last_lines)
    advice = import_advice(text, python, script)
    if unset := _UNSET.search(text):
        advice = f"ranks do not have the variables of your shell: muster submit -e {unset[1]}"
    return [*exited.last_lines, *([advice] if advice else [])]


def count_end_with_agent(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> JobSnapshot:
    """Count the end of a process that was gone when its agent's successor looked."""
    if snapshot.is_ending or not rank.in_service:
        return snapshot
    if rank.trouble is None or rank.attempt.intent.is_ours:
        return snapshot
    counted = _count_failure(snapshot, rank, now)
    snapshot = snapshot.with_rank(counted)
    limit = _exhausted_limit(snapshot, counted, RetryClass.INFRASTRUCTURE)
    if limit is None:
        return snapshot
    reason, words = limit
    message = f"{snapshot.rank_name(rank)} {rank.trouble.message} and {words}"
    return snapshot.fail(JobFailure(reason=reason, message=message), now)


def _restart_or_fail(
    snapshot: JobSnapshot, rank: RankSnapshot, ending: AttemptEnd, message: RankExited, now: float
) -> JobSnapshot:
    rank = _count_end(snapshot, rank, ending, message, now)
    fruitless, proven = rank.budget.fruitless, rank.budget.proven_step
    for member in snapshot.ranks if snapshot.is_gang else ():
        shared = replace(member.budget, fruitless=fruitless, proven_step=proven)
        snapshot = snapshot.with_rank(replace(member, budget=shared))
    snapshot = snapshot.with_rank(rank)
    limit = _exhausted_limit(snapshot, rank, ending.retry_class)
    # Only of the first attempts: a program that has worked may miss a file for a moment.
    is_unproven = rank.budget.fruitless >= MISTAKES_LIMIT >= snapshot.count_attempts(rank)
    if limit is None and is_unproven and ending.is_mistake:
        limit = Reason.INVALID_PROGRAM, "a restart did not help"
    if limit is not None:
        return snapshot.fail(_failure(snapshot, rank, ending, message, *limit), now)
    counted = _count_restart(snapshot, rank, ending.retry_class, now)
    if message.retry_after_seconds is not None:
        start_at = now + message.retry_after_seconds
        counted = replace(counted, budget=replace(counted.budget, start_at=start_at))
    return snapshot.with_rank(counted)


def _count_end(
    snapshot: JobSnapshot, rank: RankSnapshot, ending: AttemptEnd, message: RankExited, now: float
) -> RankSnapshot:
    """Count an end that the program may have caused, or note that the program has worked."""
    retry = RETRIES.get(ending.retry_class)
    is_unobserved = ending.retry_class is RetryClass.INFRASTRUCTURE and not message.is_waiting
    is_unobserved &= not rank.attempt.intent.is_ours
    if is_unobserved or (retry is not None and not retry.is_from_outside):
        return _count_failure(snapshot, rank, now)
    if not (rank.has_progressed or _has_lived_long(snapshot, rank, now)):
        return rank
    worked = replace(rank.budget, proven_step=max(rank.budget.proven_step, 0))
    return replace(rank, budget=worked)


def _count_failure(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> RankSnapshot:
    """Count a failure without progress, or reset the count if the job got further than before.

    Of an independent rank only a checkpoint counts, as its steps are lost: a program that fails at
    the same step each time makes no progress. For a program that never reports checkpoints a long
    enough life counts as one.
    """
    budget, reached = rank.budget, snapshot.durable_step(rank)
    if snapshot.is_synchronous and rank.has_progressed:
        reached = max(reached or 0, rank.progress.step)
    if reached is None:
        is_progress = _has_lived_long(snapshot, rank, now)
        proven = max(budget.proven_step, 0) if is_progress else budget.proven_step
    else:
        is_progress, proven = reached > budget.proven_step, max(reached, budget.proven_step)
    fruitless = 0 if is_progress else budget.fruitless + 1
    return replace(rank, budget=replace(budget, fruitless=fruitless, proven_step=proven))


def _count_restart(
    snapshot: JobSnapshot, rank: RankSnapshot, kind: RetryClass, now: float
) -> RankSnapshot:
    """Count a restart and delay it by the failures in a row."""
    retry, budget = RETRIES.get(kind), rank.budget
    is_healthy = rank.has_progressed or _has_lived_long(snapshot, rank, now)
    failures = 1 if is_healthy else 1 + budget.failures
    if retry is not None and retry.is_from_outside:
        failures = int(not rank.has_progressed)  # a longer wait does not keep a signal away
    start_at = now + snapshot.backoff.delay_seconds(failures, f"{snapshot.uid}/{rank.rank}")
    restarts = budget.restarts + (retry is not None and retry.is_restart)
    spent = replace(budget, failures=failures, start_at=start_at, restarts=restarts)
    return replace(rank, budget=spent)


def _has_lived_long(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> bool:
    return rank.attempt.healthy_seconds(now) >= snapshot.backoff.reset_after_seconds


def _exhausted_limit(
    snapshot: JobSnapshot, rank: RankSnapshot, kind: RetryClass
) -> tuple[Reason, str] | None:
    """Return the limit that forbids another attempt, as a reason and a verb phrase."""
    if kind is RetryClass.DO_NOT_RETRY:
        return Reason.DO_NOT_RETRY, "is not to be started again"
    retry = RETRIES.get(kind)
    has = "its gang has" if snapshot.is_gang and len(snapshot.ranks) > 1 else "has"
    if retry is not None:
        most: int = getattr(snapshot.spec, retry.budget)
        if snapshot.count_endings(rank, kind) > most:
            used_up = {0: "may not be restarted", 1: f"{has} used its one restart"}
            words = used_up.get(most, f"{has} used its {most} restarts")
            return Reason.RESTART_LIMIT, f"{words}{retry.occasion}"
    if rank.budget.fruitless >= snapshot.spec.max_fruitless:
        words = f"{has} failed {rank.budget.fruitless} times in a row without progress"
        return Reason.NO_PROGRESS, words
    return None


def _failure(
    snapshot: JobSnapshot,
    rank: RankSnapshot,
    ending: AttemptEnd,
    message: RankExited,
    reason: Reason,
    limit: str,
) -> JobFailure:
    """Return the job's failure: what happened to the rank, the limit, the end of its log."""
    intent, name = rank.attempt.intent, snapshot.rank_name(rank)
    done = [other for other in snapshot.ranks if other.finished and not other.is_alive]
    has_waited = ending.reason is Reason.NO_PROGRESS or has_lost_peer(message)
    if snapshot.is_gang and done and has_waited:
        uneven = "exited with code 0 before the others: have all ranks as many steps? Then"
        name = f"{snapshot.rank_name(done[0])} {uneven} {name}"
    is_slow = intent.terminated_at is not None and message.signal == SIGTERM
    if is_slow:  # its exit took so long that it was asked to
        what = "failed first"
    elif intent.kill is not None:
        what = intent.kill.message
    elif ending.retry_class is RetryClass.INFRASTRUCTURE:
        what = ending.message
    elif ending.retry_class is RetryClass.PREEMPTION and intent.stopping:
        what = "was asked to stop by another process"
    else:
        # The end of the log follows, so the program's own report is enough only if it has one.
        what = describe_exit(rank.attempt) if message.error is None else ending.message
    # No lines are kept of an exit with code 0, nor of a process that never started.
    has_lines = message.exit_code != 0 and message.unstarted is None
    quote = quote_lines(_last_lines(snapshot.spec, message)) if has_lines else ""
    code = SIGNAL_BASE + (message.signal or 0) if message.exit_code is None else message.exit_code
    code = 1 if is_slow else code or 1  # a failed job is never 0
    told = f"{name} {what} and {limit}{quote}"
    blamed = message if snapshot.is_gang else None
    return JobFailure(reason=reason, message=told, exit_code=code, blamed=blamed, limit=limit)
