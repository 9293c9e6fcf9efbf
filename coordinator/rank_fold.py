"""What happened → what is known, for one rank. Pure, like all of `coordinator.fold`."""

from dataclasses import replace
from math import isfinite
from typing import assert_never

from coordinator import actions
from coordinator.snapshot import NEVER, Cause, Ending, RankSnapshot
from muster.contracts import rank as rank_rules
from muster.contracts.backoff import Backoff
from muster.contracts.endings import RetryClass
from muster.contracts.job import Reason
from muster.contracts.messages import Beat, RankExited
from muster.contracts.rank import ProcessState

THROUGHPUT_WINDOW_SECONDS = 1.0
"""Steps are counted over at least this long: beats may come much closer together."""

THROUGHPUT_WEIGHT = 0.5
"""Of the newest window, in a moving average."""


def taken(rank: RankSnapshot, action: actions.RankAction, now: float) -> RankSnapshot:
    match action:
        case actions.Start():
            return _started(rank, now)
        case actions.Terminate():
            return replace(rank, terminated=True, terminated_at=now)
        case actions.KillProcess():
            return replace(rank, kill=action.cause, killed_at=now)
        case actions.Suspect():
            return _moved(rank, ProcessState.SUSPECT)
    assert_never(action)


def _started(rank: RankSnapshot, now: float) -> RankSnapshot:
    return replace(
        rank,
        incarnation=rank.incarnation + 1,
        process=ProcessState.SPAWNED,
        identity=None,
        beats=False,
        spawned_at=now,
        heard_at=now,
        progressed_at=NEVER,
        stopped_at=None,
        live_at=NEVER,
        terminated=False,
        finished=False,
        stopping=False,
        orphaned_by=None,
        waiting=False,
        kill=None,
        refused=None,
        raised=None,
        step_at_start=None,
        has_told_step=False,
        warning=None,
        exit_code=None,
        exit_signal=None,
        checkpoints_before=rank.checkpoints_before + rank.checkpoints_saved,
        checkpoints_saved=0,
        throughput_steps_per_sec=0.0,
        measured_at=NEVER,
        ready=None,
        took_up=-1,
        stranded=-1,
    )


def _moved(rank: RankSnapshot, target: ProcessState) -> RankSnapshot:
    if rank.process is target:
        return rank
    return replace(rank, process=rank_rules.move(rank.process, target))


def ended_unseen(rank: RankSnapshot, ending: Ending) -> RankSnapshot:
    """Return the rank without its process, which is gone for no fault of its own."""
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
    return ended(gone, ending)


def ended(rank: RankSnapshot, ending: Ending) -> RankSnapshot:
    """Return the rank, whose process is gone, with how it ended."""
    kind = ending.retry_class
    counted = {**rank.endings, kind: rank.endings.get(kind, 0) + 1}
    return replace(rank, ending=ending, endings=counted)


def orphaned(rank: RankSnapshot, now: float) -> RankSnapshot:
    """Return a rank that goes on without its agent, and has the next one to introduce itself to."""
    return replace(rank, ready=None, stranded=-1, spawned_at=now)


def alive(rank: RankSnapshot, now: float) -> RankSnapshot:
    first = rank.process is ProcessState.SPAWNED
    return replace(
        _moved(rank, ProcessState.LIVE),
        heard_at=now,
        live_at=now if first else rank.live_at,
        trouble=None,
    )


def greeted(rank: RankSnapshot, now: float) -> RankSnapshot:
    """From the first hello on silence and lack of progress mean something."""
    progressed_at = rank.progressed_at if rank.beats else now
    return replace(alive(rank, now), beats=True, progressed_at=progressed_at)


def beaten(rank: RankSnapshot, beat: Beat, backoff: Backoff, now: float) -> RankSnapshot:
    rank = greeted(rank, now)
    healthy_seconds = now - rank.live_at
    return replace(
        _measured(rank, beat.step, now),
        step=beat.step,
        total_steps=beat.total_steps,
        epoch=beat.epoch,
        shard_idx=beat.shard_idx,
        line_idx=beat.line_idx,
        loss=beat.loss if beat.loss is not None and isfinite(beat.loss) else None,
        metrics={name: value for name, value in beat.metrics.items() if isfinite(value)},
        stopping=beat.stopping,
        waiting=beat.waiting,
        progressed_at=now if _is_progress(rank, beat) else rank.progressed_at,
        failures=backoff.failures_after(rank.failures, healthy_seconds),
        checkpoints_saved=beat.checkpoints_saved,
        last_checkpoint_step=(
            rank.last_checkpoint_step
            if beat.last_checkpoint_step is None
            else beat.last_checkpoint_step
        ),
    )


def placed(rank: RankSnapshot, beat: Beat) -> RankSnapshot:
    """Return a rank that trains by itself with where its present process began.

    That is the checkpoint it names before it has saved one; without any, the very beginning. One
    that has taken no step may still be reading a checkpoint: where it begins it will say.
    """
    began = rank.step_at_start
    if began is None:
        restored = beat.last_checkpoint_step
        first = 0 if restored is None and beat.step else restored
        began = beat.step if beat.checkpoints_saved else first
    return replace(rank, has_told_step=True, step_at_start=began)


def _is_progress(rank: RankSnapshot, beat: Beat) -> bool:
    """Whether nobody can blame a rank until now; its time begins when it stops waiting."""
    return beat.step != rank.step or beat.waiting or rank.waiting


def _measured(rank: RankSnapshot, step: int, now: float) -> RankSnapshot:
    """Bring the throughput up to date once a window has passed."""
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


def exited(rank: RankSnapshot, message: RankExited) -> RankSnapshot:
    """Return the rank without its process, which its parent has reaped.

    Code 0 means done, unless it had been asked to go: then work may be left.
    """
    gone = replace(
        _moved(rank, ProcessState.EXITED),
        identity=None,
        exit_code=message.exit_code,
        exit_signal=message.signal,
        throughput_steps_per_sec=0.0,
    )
    if message.exit_code != 0 or rank.is_asked_to_go or rank.stopping:
        return gone
    return replace(gone, finished=True, trouble=None)


def pushed_on(rank: RankSnapshot, seconds: float, now: float) -> RankSnapshot:
    """Return the rank with every deadline that it has to meet later by so much.

    What was heard of it since then is not pushed into the future.
    """
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
