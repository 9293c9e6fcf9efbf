"""The sentences that people read about ranks, in one place and one voice."""

import signal
from collections.abc import Sequence
from typing import Final

from coordinator.snapshot import Cause, JobSnapshot, RankSnapshot

QUOTE_LIMIT: Final = 200
"""Most characters of a log that a status message repeats."""


def describe_exit(rank: RankSnapshot) -> str:
    """Return how the last process of a rank ended: a verb phrase."""
    if rank.exit_signal is not None:
        return f"was ended by signal {rank.exit_signal} ({signal_name(rank.exit_signal)})"
    if rank.exit_code is not None:
        return f"exited with code {rank.exit_code}"
    return "ended unseen"


def quote_end(last_lines: Sequence[str]) -> str:
    """Return the last line of a log in brackets: with a traceback, that is what went wrong."""
    line = next((line.strip() for line in reversed(last_lines) if line.strip()), "")
    return f" ({line[:QUOTE_LIMIT]})" if line else ""


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "an unnamed signal"


def describe_recovery(snapshot: JobSnapshot, rank: RankSnapshot, cause: Cause) -> str:
    """Return what happened to a rank that is down or coming back, and how often it has."""
    sentence = f"rank {rank.rank} {cause.message}"
    if rank.restarts == 0:
        return f"{sentence}; it goes on from its last checkpoint"
    return f"{sentence}; restart {rank.restarts} of {snapshot.spec.max_restarts}"
