"""What users read about a job: its events, and the sentences of its status. Pure.

Heartbeats are not events. An observation becomes an event only if it changed the snapshot, so that
a repeated message is one event.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import SIGKILL
from typing import Final

from coordinator.decide import actions
from coordinator.decide.actions import Observation
from coordinator.decide.state.job import GroupSnapshot, JobSnapshot
from coordinator.decide.state.rank import Attempt, Cause, RankSnapshot
from muster.contracts.job.retry import RETRIES, describe_end
from muster.contracts.job.status import JobStatus, Reason
from muster.contracts.messages.agent import CheckpointsListed, RankExited, RankSaid, RankSpawned
from muster.contracts.messages.rank import (
    Code,
    Heartbeat,
    PeerLost,
    PermanentFailure,
    RestoreFailed,
    Saved,
    StateMismatch,
    Warned,
)

QUOTE_LIMIT: Final = 200  # most characters of a log line that a status message repeats

REPORT_LIMIT: Final = 2000  # most characters of a program's own text in a message or event

_ERROR: Final = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|Interrupt)(: |$)")

OVERLOADED: Final = (
    "is overloaded: processes of this job are late because no processor is free for them, and are "
    "not taken for dead; run fewer processes there"
)


_NEED_A_HOST: Final = frozenset(
    {Reason.HOST_LOST, Reason.DIFFERENT_BITS, Reason.INVALID_DATASET, Reason.INVALID_CHECKPOINT}
)
"""Troubles of a rank that only another host, or the return of one, ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """One event, without its time."""

    kind: str
    message: str
    rank: int | None = None
    attempt: int | None = None


def event_of(  # noqa: C901, PLR0911, PLR0912  one return for each kind of observation
    before: JobSnapshot, observation: Observation, after: JobSnapshot
) -> NewEvent | None:
    """Return the event of an observation that led from `before` to `after`, if it is one."""
    if after == before:
        return None
    match observation:
        case actions.AgentSaid(message=CheckpointsListed(problem=str(problem))):
            words = f"the checkpoints of the gang cannot be listed: {excerpt(problem)}"
            return NewEvent(kind="warned", message=f"{words}. They are listed again in seconds")
        case actions.AgentSaid() if after.restore != before.restore and after.restore.message:
            return NewEvent(kind="checkpoint_chosen", message=after.restore.message)
        case RankSaid(message=Code()) | actions.CodeTaken():
            is_new = after.code.note != before.code.note
            return NewEvent(kind="code_changed", message=after.code.note) if is_new else None
        case actions.OfHost(host=host) if after.is_overloaded and not before.is_overloaded:
            machine = after.host_name(host) if after.spans_hosts else "the machine"
            return NewEvent(kind="overloaded", message=f"{machine} {OVERLOADED}")
        case RankSaid() if after.is_past_loop and not before.is_past_loop:
            return NewEvent(kind="loop_ended", message=describe_export(after))
        case RankSaid():
            return _of_message(before, observation, after)
        case RankSpawned(rank=rank):
            attempt = after.ranks[rank].attempt
            is_known = before.ranks[rank].attempt.identity == attempt.identity
            if is_known or attempt.intent.kill is not None:
                return None  # this, or its kill, was an event already
            where = f" on {after.host_name(after.ranks[rank].host)}" if after.spans_hosts else ""
            return _of_rank(after, rank, "rank_started", f"runs as pid {observation.pid}{where}")
        case RankExited():
            return _of_exit(before, observation, after)
        case actions.AgentConnected(host=host) if any(one.is_alive for one in after.ranks_on(host)):
            sentence = f"{after.agent_name(host)} has connected, its ranks go on"
            if before.agents[observation.host].is_inherited:
                sentence = f"a new coordinator has taken over; {sentence}"
            return NewEvent(kind="agent_adopted", message=sentence)
        case actions.AgentLost(host=host, message=why) if before.needs_agent(before.ranks_on(host)):
            trouble = after.agents[host].trouble
            is_known = trouble is not None and trouble == before.agents[host].trouble
            return None if is_known else NewEvent(kind="agent_lost", message=why)
        case actions.ActionTaken():
            return _of_action(before, observation.action, after)
        case _:
            return None


def _of_exit(before: JobSnapshot, exited: RankExited, after: JobSnapshot) -> NewEvent | None:
    if before.ranks[exited.rank].attempt.intent.kill is not None and exited.signal == SIGKILL:
        return None  # its kill was an event already
    ended = describe_exit(after.ranks[exited.rank].attempt)
    words = ended if exited.unstarted is None else excerpt(exited.unstarted)
    if before.ranks[exited.rank].finished and exited.exit_code != 0:
        is_finished = after.ranks[exited.rank].finished
        words += " after it had finished" + (", so nothing is lost" if is_finished else "")
    elif not after.is_needed(after.ranks[exited.rank]) and exited.exit_code != 0:
        words += f" after the loop; it is not started again: rank {after.end.exporter} exports"
    trouble = before.ranks[exited.rank].trouble
    is_known = before.is_gang_broken or (trouble is not None and trouble.message == words)
    if exited.is_waiting and is_known:
        return None  # an event of a gang, or of an earlier attempt, says so
    return _of_rank(after, exited.rank, "rank_exited", words)


def _of_message(before: JobSnapshot, said: RankSaid, after: JobSnapshot) -> NewEvent | None:
    is_replacement = after.ranks[said.rank].attempt.number > 0
    if is_replacement and after.is_ready(said.rank) and not before.is_ready(said.rank):
        return _of_rank(after, said.rank, "rank_ready", "is ready")
    match said.message:
        case Heartbeat() if _is_first_step(before, said.rank, after):
            ranks = ", ".join(map(str, sorted(after.group.ranks)))
            who = f"rank {ranks} has" if len(after.group.ranks) == 1 else f"ranks {ranks} have"
            step = after.ranks[said.rank].progress.step
            return NewEvent(kind="step_taken", message=f"{who} taken step {step}")
        case Warned(message=warning) | RestoreFailed(message=warning):
            attempt = before.ranks[said.rank].attempt.number
            message = f"rank {said.rank}: {warning}"
            return NewEvent(kind="warned", message=message, rank=said.rank, attempt=attempt)
        case StateMismatch() as mismatch:
            workers = ", ".join(map(str, mismatch.workers))
            plural = "" if len(mismatch.workers) == 1 else "s"
            message = f"worker{plural} {workers}: {excerpt(mismatch.message)}"
            return NewEvent(kind="state_mismatch", message=message)
        case Saved(step=step) if before.checkpoint_requests_done < after.checkpoint_requests_done:
            words = f"the requested checkpoint of step {step} is durable"
            return NewEvent(kind="checkpoint_saved", message=words)
        case PermanentFailure(message=why) if (
            after.failure is None and after.agent_of(after.ranks[said.rank]).is_unfit
        ):
            words = f"was refused on {after.host_name(after.ranks[said.rank].host)}: {excerpt(why)}"
            return _of_rank(after, said.rank, "host_set_aside", words)
        case PeerLost() as lost:
            return _of_lost_peer(before, said.rank, lost)
        case _:
            return None


def _is_first_step(before: JobSnapshot, number: int, after: JobSnapshot) -> bool:
    """True if a rank is the first of its group that reports a new step."""
    present = after.group.round
    if not after.group.ranks:  # a new coordinator has not announced one yet
        return False
    if after.ranks[number].attempt.member.stepped_round != present:
        return False
    return all(rank.attempt.member.stepped_round < present for rank in before.ranks)


def _of_lost_peer(before: JobSnapshot, rank: int, lost: PeerLost) -> NewEvent | None:
    """Report the first of the members that lose each other; the others say the same.

    Members of an ending job lose each other as they exit one after the other.
    """
    group = before.group
    is_known = any(other.attempt.member.peer_lost_round >= group.round for other in before.ranks)
    if before.is_ending or is_known or lost.round != group.round:
        return None
    why = excerpt(lost.message)
    return _of_rank(before, rank, "peer_lost", f"has lost a rank that it trains with: {why}")


def _of_action(before: JobSnapshot, action: actions.Action, after: JobSnapshot) -> NewEvent | None:
    match action:
        case actions.KillProcess():
            return _of_rank(after, action.rank, "rank_killed", action.cause.message)
        case actions.KillAgent(host=host):
            message = f"{after.agent_name(host)} does not answer and is ended"
            return NewEvent(kind="agent_killed", message=message)
        case actions.LoseHost(host=host, why=why):
            ranks = ", ".join(str(rank.rank) for rank in before.ranks_on(host) if rank.is_alive)
            name = after.host_name(host)
            message = f"{name} and its ranks ({ranks or 'none'}) were given up: {why}"
            return NewEvent(kind="host_lost", message=message)
        case actions.PublishGroup():
            return NewEvent(kind="group_announced", message=describe_group(action.group))
        case actions.Suspect():
            return _of_rank(after, action.rank, "rank_suspected", "is late with its heartbeat")
        case actions.ReportSlowExit():
            return _of_rank(after, action.rank, "slow_exit", _describe_slow_exit(after, action))
        case actions.SetStatus() if before.status is not after.status:
            return _of_status(after)
        case _:
            return None


def _of_status(after: JobSnapshot) -> NewEvent:
    if after.status is JobStatus.STOPPING and after.failure is not None:
        # The cause follows with the event of the failure itself.
        words = "the job cannot go on; ranks that still run save and exit"
        return NewEvent(kind="job_failing", message=words)
    # The note of the submission does not explain a later status.
    why = None if after.message == after.note else after.message
    sentence = f"the job is {after.status}"
    message = f"{sentence}: {why}" if why else sentence
    return NewEvent(kind=f"job_{after.status.lower()}", message=message)


def _of_rank(snapshot: JobSnapshot, rank: int, kind: str, words: str) -> NewEvent:
    attempt = snapshot.ranks[rank].attempt.number
    return NewEvent(kind=kind, message=f"rank {rank} {words}", rank=rank, attempt=attempt)


# Sentences


def describe_held(steps: Mapping[int, int | None], where: str = "") -> str:
    """Say which ranks are held, `steps` by rank, and on which machine their checkpoints are."""
    ranks = ", ".join(f"{rank} (step {step})" for rank, step in steps.items())
    return (
        f"held: the newest checkpoints of ranks {ranks} lie on {where or 'another machine'}, which "
        "is away; they go on once it leads again, or has a copy here"
    )


def excerpt(text: str) -> str:
    """Return a program's text, shortened and without control characters."""
    cut = text if len(text) <= REPORT_LIMIT else f"{text[:REPORT_LIMIT]} …"
    return "".join(c if c.isprintable() or c == "\n" else " " for c in cut)


def last_line(last_lines: Sequence[str]) -> str:
    """Return the last line that is not blank; after a traceback it names the error."""
    return next((line.strip() for line in reversed(last_lines) if line.strip()), "")


def error_lines(last_lines: Sequence[str]) -> Sequence[str]:
    """Return the last line that names an error, as a traceback ends; all if there is none.

    Exit handlers may print after it.
    """
    return [line for line in last_lines if _ERROR.match(line)][-1:] or last_lines


def quote_end(last_lines: Sequence[str]) -> str:
    """Return the last line of a log in brackets."""
    line = excerpt(last_line(last_lines)[:QUOTE_LIMIT])
    return f" ({line})" if line else ""


def quote_lines(last_lines: Sequence[str]) -> str:
    """Return the end of a log, to follow a sentence about a rank."""
    lines = "".join(f"\n  {excerpt(line)}" for line in last_lines)
    return f"; the last lines of its log:{lines}" if lines else "; its log is empty"


def describe_exit(attempt: Attempt) -> str:
    """Return how the process of an attempt ended: a verb phrase."""
    return describe_end(attempt.exit_code, attempt.exit_signal)


def _describe_slow_exit(snapshot: JobSnapshot, action: actions.ReportSlowExit) -> str:
    rank, seconds = snapshot.ranks[action.rank], snapshot.spec.heartbeat_timeout
    has = "has finished, and is" if rank.finished else "is"
    return (
        f"{has} exiting for {seconds:g} s: an exit handler (atexit) of the program may wait for a "
        f"slow service. It is killed after {action.limit_seconds:.0f} s ({action.limit})"
    )


def describe_group(group: GroupSnapshot) -> str:
    """Return which ranks train together from now on."""
    ranks = ", ".join(map(str, sorted(group.ranks)))
    is_alone = len(group.ranks) == 1
    words = f"rank {ranks} trains alone" if is_alone else f"ranks {ranks} train together"
    if group.paused:
        words = f"no step is taken until the job is resumed (ranks {ranks})"
    return f"{words}; the requested checkpoint is saved first" if group.save else words


def describe_late_agent(snapshot: JobSnapshot, seconds: float) -> str:
    """Return that a job cannot start, and what may tell why."""
    if snapshot.is_scheduled:
        engine = snapshot.spec.engine
        return f"no agent has connected for {seconds:g} s; is {engine} there? See muster engines"
    return (
        f"its agent has not connected to the coordinator for {seconds:g} s; see "
        f"jobs/{snapshot.job_id}/run/agent.log in the data directory"
    )


def describe_recovery(snapshot: JobSnapshot, rank: RankSnapshot, cause: Cause) -> str:
    """Return what happened to a rank that restarts, and how much of its budget is used."""
    sentence = f"{snapshot.rank_name(rank)} {cause.message}"
    retry = None if rank.ending is None else RETRIES.get(rank.ending.retry_class)
    if rank.ending is None or retry is None or not retry.is_restart:
        is_lost = cause.reason in _NEED_A_HOST
        when = "once there is room for it, or its host is back, " if is_lost else ""
        return f"{sentence}; {when}{_next_start(snapshot, rank)}"
    count = snapshot.count_endings(rank, rank.ending.retry_class)
    limit = getattr(snapshot.spec, retry.budget)
    fruitless, most = rank.budget.fruitless, snapshot.spec.max_fruitless
    again = "all ranks are" if snapshot.is_gang else "it is"
    is_lasting = rank.ending.is_mistake or (rank.ending.error and len(snapshot.in_service) == 1)
    is_first = is_lasting and fruitless and snapshot.count_attempts(rank) == 1
    if is_first or rank.ending.is_raised:  # see `fold_exit.MISTAKES_LIMIT` and `record_error`
        return f"{sentence}; {again} started again, and a second failure like this ends the job"
    # Show the nearer limit: the job fails with the last such failure, or after the last restart.
    if fruitless and not retry.is_from_outside and most - fruitless <= limit - count + 1:
        failures = f"failure {fruitless} of {most} in a row without progress"
        return f"{sentence}; {again} started again ({failures})"
    all_ranks = "all ranks are started again, " if snapshot.is_gang else ""
    return f"{sentence}; {all_ranks}restart {count} of {limit}{retry.occasion}"


def describe_export(snapshot: JobSnapshot) -> str:
    """Return what a job waits for after the loop."""
    if snapshot.is_done:
        return "the script has ended; the other ranks are exiting"
    return (
        "training is over and saved; the job is complete once the script of rank "
        f"{snapshot.end.exporter} has ended with exit code 0"
    )


def describe_stop(snapshot: JobSnapshot) -> str:
    """Return how a job ended that a user has stopped, and what is left of it."""
    is_saved = any(rank.progress.last_checkpoint_step is not None for rank in snapshot.ranks)
    left = "its checkpoints are kept" if is_saved else "no checkpoint of it is known"
    return f"stopped on request; {left}"


def _next_start(snapshot: JobSnapshot, rank: RankSnapshot) -> str:
    """Return where a rank resumes, as far as that is known."""
    if snapshot.is_gang:
        return "all ranks are started again"
    is_training = snapshot.is_synchronous and not snapshot.is_past_loop
    if is_training and any(
        other.is_alive and other.has_joined for other in snapshot.ranks if other.rank != rank.rank
    ):
        return "it gets its state from the others"
    if snapshot.durable_step(rank) is not None:
        return "it resumes from its last checkpoint"
    if rank.progress.step > 0:
        return "it starts from the beginning, as no checkpoint of it is known"
    # A program that reports no steps may keep state anywhere.
    return "it is started again"
