"""The sentences that people read about ranks, in one place and one voice."""

from collections.abc import Sequence
from typing import Final

from coordinator.snapshot import Cause, JobSnapshot, LayoutSnapshot, RankSnapshot
from muster.contracts.endings import RETRIES, describe_end

QUOTE_LIMIT: Final = 200
"""Most characters of a log that a status message repeats."""

SAID_LIMIT: Final = 2000
"""Most characters of a program's own words that a job's message or event holds."""


def describe_exit(rank: RankSnapshot) -> str:
    """Return how the last process of a rank ended: a verb phrase."""
    return describe_end(rank.exit_code, rank.exit_signal)


def legible(text: str) -> str:
    """Return what a program said, fit to be shown: bounded, and without control characters."""
    cut = text if len(text) <= SAID_LIMIT else f"{text[:SAID_LIMIT]} …"
    return "".join(c if c.isprintable() or c == "\n" else " " for c in cut)


def last_line(last_lines: Sequence[str]) -> str:
    """Return the last line of a log that is not blank; with a traceback it says what went wrong."""
    return next((line.strip() for line in reversed(last_lines) if line.strip()), "")


def quote_end(last_lines: Sequence[str]) -> str:
    """Return the last line of a log in brackets."""
    line = legible(last_line(last_lines)[:QUOTE_LIMIT])
    return f" ({line})" if line else ""


def quote_lines(last_lines: Sequence[str]) -> str:
    """Return the end of a log as what follows a sentence about a rank."""
    lines = "".join(f"\n  {legible(line)}" for line in last_lines)
    return f"; the last lines of its log:{lines}" if lines else "; its log is empty"


def describe_layout(layout: LayoutSnapshot) -> str:
    """Return who trains together from now on."""
    ranks = ", ".join(map(str, sorted(layout.ranks)))
    if layout.paused:
        return f"no step is taken until the job is resumed (ranks {ranks})"
    one = len(layout.ranks) == 1
    return f"rank {ranks} trains alone" if one else f"ranks {ranks} train together"


def name_lost(snapshot: JobSnapshot) -> str:
    """Return which rank a gang was the first to lose, as far as that is known."""
    lost = (rank.rank for rank in snapshot.ranks if rank.is_down and rank.trouble is not None)
    return next((f"rank {number}" for number in lost), "another rank")


def describe_recovery(snapshot: JobSnapshot, rank: RankSnapshot, cause: Cause) -> str:
    """Return what happened to a rank that is down or coming back, and how near its limit it is."""
    sentence = f"rank {rank.rank} {cause.message}"
    retry = None if rank.ending is None else RETRIES.get(rank.ending.retry_class)
    if rank.ending is None or retry is None or not retry.is_restart:
        return f"{sentence}; {_next_start(snapshot, rank)}"
    count, limit = rank.endings[rank.ending.retry_class], getattr(snapshot.spec, retry.budget)
    fruitless, most = rank.fruitless, snapshot.spec.max_fruitless
    # A job ends with the last fruitless end, and with the one after the last restart.
    if fruitless and rank.is_to_blame and most - fruitless <= limit - count + 1:
        failures = f"failure {fruitless} of {most} in a row without a new checkpoint"
        if snapshot.is_gang:
            return f"{sentence}; all ranks are started again (rank {rank.rank}: {failures})"
        return f"{sentence}; it is started again ({failures})"
    all_of_them = "all ranks are started again, " if snapshot.is_gang else ""
    return f"{sentence}; {all_of_them}restart {count} of {limit}{retry.occasion}"


def describe_stop(snapshot: JobSnapshot) -> str:
    """Return how a job ended that a person has stopped, and what is left of it."""
    is_saved = any(rank.last_checkpoint_step is not None for rank in snapshot.ranks)
    left = "its checkpoints are kept" if is_saved else "no checkpoint of it is known"
    return f"stopped on request; {left}"


def _next_start(snapshot: JobSnapshot, rank: RankSnapshot) -> str:
    """Return from where a rank goes on, as far as that is known."""
    if snapshot.is_gang:
        return "all ranks are started again"
    if snapshot.is_synchronous and any(
        other.is_alive and other.took_up >= 0 for other in snapshot.ranks if other.rank != rank.rank
    ):
        return "it gets its state from the others"
    if snapshot.durable_step(rank) is not None:
        return "it goes on from its last checkpoint"
    if rank.step > 0:
        return "it starts from the beginning, as no checkpoint of it is known"
    # Of a program that tells of no steps nobody knows what it keeps where.
    return "it is started again"
