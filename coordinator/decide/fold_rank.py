"""The part of `fold` that concerns one rank alone. Pure."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import msgspec

from coordinator.decide.state.rank import (
    NEVER,
    Attempt,
    AttemptEnd,
    Cause,
    EndIntent,
    RankSnapshot,
    Throughput,
)
from muster.contracts.job.retry import Backoff, RetryClass
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import RankExited
from muster.contracts.messages.rank import Heartbeat
from muster.contracts.rank import COUNT_MAX, Phase, ProcessState

THROUGHPUT_WINDOW_SECONDS: Final = 1.0
"""Steps are counted over at least this long; heartbeats may come much closer together."""

_ATTEMPT_BEGAN: Final = ("spawned_at", "seen_at", "progressed_at", "exiting_at", "stopped_at")
_INTENT_BEGAN: Final = ("terminated_at", "killed_at", "asked_at")
"""The moments from which deadlines count."""

THROUGHPUT_WEIGHT: Final = 0.5  # weight of the newest window in the exponential moving average


def begin_attempt(rank: RankSnapshot, now: float) -> RankSnapshot:
    """Return the rank with its next attempt, which is about to be started."""
    number = rank.attempt.number + 1
    started = Attempt(number=number, process=ProcessState.SPAWNED, spawned_at=now, seen_at=now)
    checkpoints = rank.checkpoints_before + rank.attempt.checkpoints_saved
    return replace(rank, attempt=started, checkpoints_before=checkpoints, finished=False)


def with_intent(rank: RankSnapshot, **changes: Any) -> RankSnapshot:  # noqa: ANN401  its fields
    """Return the rank whose attempt has another intent to end."""
    intent = replace(rank.attempt.intent, **changes)
    return replace(rank, attempt=replace(rank.attempt, intent=intent))


# Signs of life


def mark_alive(rank: RankSnapshot, now: float) -> RankSnapshot:
    """Record a sign of life."""
    return replace(rank, attempt=_alive(rank.attempt, now), trouble=None)


def record_hello(rank: RankSnapshot, now: float) -> RankSnapshot:
    """From the first hello on, silence and lack of progress count."""
    rank = _begin_anew(rank)
    progressed_at = rank.attempt.progressed_at if rank.attempt.sends_heartbeats else now
    alive = _alive(rank.attempt, now, sends_heartbeats=True, progressed_at=progressed_at)
    return replace(rank, attempt=alive, trouble=None)


def record_command(rank: RankSnapshot, now: float) -> RankSnapshot:
    """The process that joined has ended, and its script goes on: neither is it silent nor slow."""
    rank = _begin_anew(rank)
    return replace(rank, attempt=_alive(rank.attempt, now, sends_heartbeats=False, died=True))


def _begin_anew(rank: RankSnapshot) -> RankSnapshot:
    """Return the rank without the exit of a process that joined before."""
    attempt = replace(rank.attempt, died=False, exiting_at=NEVER, is_slow_exit=False)
    if rank.is_exiting:
        attempt = attempt.move(ProcessState.LIVE)
    return replace(rank, finished=False, attempt=attempt)


def record_heartbeat(
    rank: RankSnapshot, beat: Heartbeat, backoff: Backoff, now: float
) -> RankSnapshot:
    """Take over the progress that a heartbeat reports."""
    # Thousands come in a second: each value is replaced once, and only if it changes.
    attempt, member, intent = rank.attempt, rank.attempt.member, rank.attempt.intent
    before, progress = rank.progress, beat.progress
    # Waiting for other ranks is not a lack of progress; the timeout restarts when it ends.
    is_progress = progress.step != before.step or beat.waiting or attempt.waiting
    if progress.last_checkpoint_at is None and before.last_checkpoint_step is not None:
        # Checkpoints of earlier attempts stay, until this one has restored or saved any.
        step = progress.last_checkpoint_step
        progress = msgspec.structs.replace(
            progress,
            last_checkpoint_step=before.last_checkpoint_step if step is None else step,
            last_checkpoint_bytes=before.last_checkpoint_bytes,
            last_checkpoint_at=before.last_checkpoint_at,
        )
    if progress.step > before.step and member.stepped_round != member.joined_round:
        member = replace(member, stepped_round=member.joined_round)
    if beat.stopping != intent.stopping:
        asked_at = now if intent.asked_at == NEVER else intent.asked_at
        intent = replace(intent, stopping=beat.stopping, asked_at=asked_at)
    beaten = _alive(
        attempt,
        now,
        sends_heartbeats=True,
        throughput=_measure(attempt.throughput, progress.step, now),
        member=member,
        intent=intent,
        waiting=beat.waiting,
        progressed_at=now if is_progress or not attempt.sends_heartbeats else attempt.progressed_at,
        # The sum of both goes into the database.
        checkpoints_saved=min(beat.checkpoints_saved, COUNT_MAX - rank.checkpoints_before),
    )
    if beat.phase is not Phase.TRAINING and not rank.is_exiting:
        beaten = replace(beaten.move(ProcessState.EXITING), exiting_at=now)
    finished = rank.finished or beat.phase is Phase.FINISHED
    rank = replace(rank, attempt=beaten, progress=progress, trouble=None, finished=finished)
    healthy_seconds = math.inf if rank.has_progressed else beaten.healthy_seconds(now)
    failures = backoff.failures_after(rank.budget.failures, healthy_seconds)
    if failures == rank.budget.failures:
        return rank
    return replace(rank, budget=replace(rank.budget, failures=failures))


def _alive(attempt: Attempt, now: float, **changes: Any) -> Attempt:  # noqa: ANN401  of its fields
    live_at = now if attempt.process is ProcessState.SPAWNED else attempt.live_at
    # A heartbeat that was on its way does not undo an exit.
    if attempt.process is not ProcessState.EXITING:
        attempt = attempt.move(ProcessState.LIVE)
    changes |= {"seen_at": now, "starved_seconds": 0.0}
    return replace(attempt, live_at=live_at, **changes)


def record_first_step(rank: RankSnapshot, beat: Heartbeat) -> RankSnapshot:
    """Record the step at which an independent rank's attempt began.

    Before its first save an attempt names the checkpoint it was restored from; without one it began
    at step 0. An attempt that has taken no step may still be reading a checkpoint.
    """
    began = rank.attempt.step_at_start
    if began is None:
        step, restored = beat.progress.step, beat.progress.last_checkpoint_step
        first = 0 if restored is None and step else restored
        began = step if beat.checkpoints_saved else first
    if rank.attempt.has_told_step and began == rank.attempt.step_at_start:
        return rank
    return replace(rank, attempt=replace(rank.attempt, has_told_step=True, step_at_start=began))


def _measure(measured: Throughput, step: int, now: float) -> Throughput:
    # Infinite at first: the rate stays 0 and the first window begins.
    seconds = now - measured.at
    if seconds < THROUGHPUT_WINDOW_SECONDS:
        return measured
    newest = max(0, step - measured.step) / seconds
    before = measured.steps_per_sec or newest
    average = THROUGHPUT_WEIGHT * newest + (1 - THROUGHPUT_WEIGHT) * before
    return Throughput(steps_per_sec=average, step=step, at=now)


def shift_deadlines(rank: RankSnapshot, seconds: float, now: float) -> RankSnapshot:
    """Shift every deadline of a living rank by `seconds`, none of them into the future."""
    if not rank.is_alive:
        return rank

    def shifted(value: Attempt | EndIntent, names: Iterable[str]) -> dict[str, Any]:
        moments = {name: getattr(value, name) for name in names}
        return {name: min(now, at + seconds) for name, at in moments.items() if at is not None}

    intent = replace(rank.attempt.intent, **shifted(rank.attempt.intent, _INTENT_BEGAN))
    attempt = replace(rank.attempt, **shifted(rank.attempt, _ATTEMPT_BEGAN), intent=intent)
    return replace(rank, attempt=attempt)


# Ends


def record_exit(rank: RankSnapshot, message: RankExited) -> RankSnapshot:
    """Return the rank without its process, which its agent has reaped.

    Code 0 means finished, unless the attempt was asked to stop: then work may be left. One that has
    said that it is finished stays so after any signal; an exit code is its verdict.
    """
    code, intent = message.exit_code, rank.attempt.intent
    gone = replace(_without_process(rank.attempt), exit_code=code, exit_signal=message.signal)
    # After the loop nothing listens to the request: the script has come to its end.
    is_asked = (intent.is_ours or intent.stopping) and not rank.attempt.member.is_past_loop
    is_finished = not code if rank.finished else code == 0 and not is_asked
    trouble = None if is_finished else rank.trouble
    return replace(rank, attempt=gone, finished=is_finished, trouble=trouble)


def count_end(rank: RankSnapshot, ending: AttemptEnd) -> RankSnapshot:
    """Record how the last attempt ended and count it in its class."""
    kind, endings = ending.retry_class, rank.budget.endings
    counted = {**endings, kind: endings.get(kind, 0) + 1}
    return replace(rank, ending=ending, budget=replace(rank.budget, endings=counted))


def end_unobserved(rank: RankSnapshot, ending: AttemptEnd) -> RankSnapshot:
    """Return the rank without its process, whose exit status is unknown."""
    if not rank.is_alive:
        return rank
    if rank.finished:
        ending = replace(ending, retry_class=RetryClass.FINISHED)
    is_missed = ending.retry_class is RetryClass.INFRASTRUCTURE
    reason = ending.reason or Reason.AGENT_LOST
    trouble = Cause(reason=reason, message=ending.message) if is_missed else None
    gone = replace(rank, attempt=_without_process(rank.attempt), trouble=trouble)
    return count_end(gone, ending)


def _without_process(attempt: Attempt) -> Attempt:
    return replace(attempt.move(ProcessState.EXITED), identity=None, throughput=Throughput())


def orphan(rank: RankSnapshot, now: float) -> RankSnapshot:
    """Return a rank that runs on without an agent; it reports to the next one from the start."""
    member = replace(rank.attempt.member, ready=None, peer_lost_round=-1)
    return replace(rank, attempt=replace(rank.attempt, member=member, spawned_at=now))
