"""The part of `fold` that concerns one rank alone. Pure."""

import math
from dataclasses import replace
from typing import Final, assert_never

import msgspec

from coordinator.decide import actions
from coordinator.decide.state import NEVER, AttemptEnd, Cause, RankSnapshot
from muster.contracts import rank as rank_rules
from muster.contracts.job import Reason
from muster.contracts.messages import Heartbeat, RankExited
from muster.contracts.rank import COUNT_MAX, ProcessState
from muster.contracts.retry import Backoff, RetryClass

THROUGHPUT_WINDOW_SECONDS: Final = 1.0
"""Steps are counted over at least this long; heartbeats may come much closer together."""

THROUGHPUT_WEIGHT: Final = 0.5  # weight of the newest window in the exponential moving average


def apply(rank: RankSnapshot, action: actions.RankAction, now: float) -> RankSnapshot:
    """Note an action that was decided about this rank."""
    match action:
        case actions.PlaceRank():
            return replace(rank, host=action.host)
        case actions.Start():
            return _begin_attempt(rank, now)
        case actions.Terminate():
            return replace(rank, terminated=True, terminated_at=now)
        case actions.KillProcess():
            return replace(rank, kill=action.cause, killed_at=now)
        case actions.Suspect():
            return _move(rank, ProcessState.SUSPECT)
    assert_never(action)


def _begin_attempt(rank: RankSnapshot, now: float) -> RankSnapshot:
    """Return the rank with a new attempt; everything that is not named here starts afresh."""
    return RankSnapshot(
        rank=rank.rank,
        host=rank.host,
        attempt=rank.attempt + 1,
        process=ProcessState.SPAWNED,
        spawned_at=now,
        heard_at=now,
        ending=rank.ending,
        trouble=rank.trouble,
        start_at=rank.start_at,
        restarts=rank.restarts,
        failures=rank.failures,
        endings=rank.endings,
        fruitless=rank.fruitless,
        proven_step=rank.proven_step,
        progress=rank.progress,
        checkpoints_before=rank.checkpoints_before + rank.checkpoints_saved,
        in_service=rank.in_service,
    )


def _move(rank: RankSnapshot, target: ProcessState) -> RankSnapshot:
    if rank.process is target:
        return rank
    return replace(rank, process=rank_rules.move(rank.process, target))


# Signs of life


def mark_alive(rank: RankSnapshot, now: float) -> RankSnapshot:
    """Record a sign of life."""
    is_first = rank.process is ProcessState.SPAWNED
    return replace(
        _move(rank, ProcessState.LIVE),
        heard_at=now,
        live_at=now if is_first else rank.live_at,
        trouble=None,
    )


def record_hello(rank: RankSnapshot, now: float) -> RankSnapshot:
    """From the first hello on, silence and lack of progress count."""
    progressed_at = rank.progressed_at if rank.beats else now
    return replace(mark_alive(rank, now), beats=True, progressed_at=progressed_at)


def record_heartbeat(
    rank: RankSnapshot, beat: Heartbeat, backoff: Backoff, now: float
) -> RankSnapshot:
    """Take over the progress that a heartbeat reports."""
    rank = record_hello(rank, now)
    before, progress = rank.progress, beat.progress
    # Waiting for other ranks is not a lack of progress; the timeout restarts when it ends.
    is_progress = progress.step != before.step or beat.waiting or rank.waiting
    if progress.last_checkpoint_step is None:
        # Checkpoints of earlier attempts stay, also while this one has not restored any.
        saved = before.last_checkpoint_step
        progress = msgspec.structs.replace(progress, last_checkpoint_step=saved)
    beaten = replace(
        _measure_throughput(rank, progress.step, now),
        progress=progress,
        stepped_round=rank.joined_round if progress.step > before.step else rank.stepped_round,
        stopping=beat.stopping,
        waiting=beat.waiting,
        progressed_at=now if is_progress else rank.progressed_at,
        # The sum of both goes into the database.
        checkpoints_saved=min(beat.checkpoints_saved, COUNT_MAX - rank.checkpoints_before),
    )
    healthy_seconds = math.inf if beaten.has_progressed else now - rank.live_at
    return replace(beaten, failures=backoff.failures_after(rank.failures, healthy_seconds))


def record_first_step(rank: RankSnapshot, beat: Heartbeat) -> RankSnapshot:
    """Record the step at which an independent rank's attempt began.

    Before its first save an attempt names the checkpoint it was restored from; without one it began
    at step 0. An attempt that has taken no step may still be reading a checkpoint.
    """
    began = rank.step_at_start
    if began is None:
        step, restored = beat.progress.step, beat.progress.last_checkpoint_step
        first = 0 if restored is None and step else restored
        began = step if beat.checkpoints_saved else first
    return replace(rank, has_told_step=True, step_at_start=began)


def _measure_throughput(rank: RankSnapshot, step: int, now: float) -> RankSnapshot:
    if rank.measured_at == NEVER:
        return replace(rank, measured_at=now, measured_step=step)
    seconds = now - rank.measured_at
    if seconds < THROUGHPUT_WINDOW_SECONDS:
        return rank
    newest = max(0, step - rank.measured_step) / seconds
    before = rank.throughput_steps_per_sec or newest
    return replace(
        rank,
        throughput_steps_per_sec=THROUGHPUT_WEIGHT * newest + (1 - THROUGHPUT_WEIGHT) * before,
        measured_at=now,
        measured_step=step,
    )


def shift_deadlines(rank: RankSnapshot, seconds: float, now: float) -> RankSnapshot:
    """Shift every deadline of a living rank by `seconds`, none of them into the future."""
    if not rank.is_alive:
        return rank
    return replace(
        rank,
        spawned_at=min(now, rank.spawned_at + seconds),
        heard_at=min(now, rank.heard_at + seconds),
        progressed_at=min(now, rank.progressed_at + seconds),
        stopped_at=None if rank.stopped_at is None else min(now, rank.stopped_at + seconds),
        terminated_at=min(now, rank.terminated_at + seconds),
        killed_at=min(now, rank.killed_at + seconds),
    )


# Ends


def record_exit(rank: RankSnapshot, message: RankExited) -> RankSnapshot:
    """Return the rank without its process, which its agent has reaped.

    Code 0 means finished, unless the attempt was asked to stop: then work may be left.
    """
    gone = replace(
        _move(rank, ProcessState.EXITED),
        identity=None,
        exit_code=message.exit_code,
        exit_signal=message.signal,
        throughput_steps_per_sec=0.0,
    )
    if message.exit_code != 0 or rank.is_asked_to_stop or rank.stopping:
        return gone
    return replace(gone, finished=True, trouble=None)


def count_end(rank: RankSnapshot, ending: AttemptEnd) -> RankSnapshot:
    """Record how the last attempt ended and count it in its class."""
    kind = ending.retry_class
    counted = {**rank.endings, kind: rank.endings.get(kind, 0) + 1}
    return replace(rank, ending=ending, endings=counted)


def end_unobserved(rank: RankSnapshot, ending: AttemptEnd) -> RankSnapshot:
    """Return the rank without its process, whose exit status is unknown."""
    if not rank.is_alive:
        return rank
    is_missed = ending.retry_class is RetryClass.INFRASTRUCTURE
    reason = ending.reason or Reason.AGENT_LOST
    gone = replace(
        rank,
        process=ProcessState.EXITED,
        identity=None,
        throughput_steps_per_sec=0.0,
        trouble=Cause(reason=reason, message=ending.message) if is_missed else None,
    )
    return count_end(gone, ending)


def orphan(rank: RankSnapshot, now: float) -> RankSnapshot:
    """Return a rank that runs on without an agent; it reports to the next one from the start."""
    return replace(rank, ready=None, peer_lost_round=-1, spawned_at=now)
