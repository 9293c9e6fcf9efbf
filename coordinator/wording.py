"""The sentences that people read about ranks, in one place and one voice."""

from collections.abc import Sequence
from typing import Final

from coordinator.snapshot import Cause, JobSnapshot, LayoutSnapshot, RankSnapshot
from muster.contracts.endings import describe_end

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


def quote_end(last_lines: Sequence[str]) -> str:
    """Return the last line of a log in brackets: with a traceback, that is what went wrong."""
    line = next((line.strip() for line in reversed(last_lines) if line.strip()), "")
    return f" ({line[:QUOTE_LIMIT]})" if line else ""


def describe_layout(layout: LayoutSnapshot) -> str:
    """Return who trains together from now on."""
    ranks = ", ".join(map(str, sorted(layout.ranks)))
    if layout.paused:
        return f"no step is taken until the job is resumed (ranks {ranks})"
    one = len(layout.ranks) == 1
    return f"rank {ranks} trains alone" if one else f"ranks {ranks} train together"


def describe_recovery(snapshot: JobSnapshot, rank: RankSnapshot, cause: Cause) -> str:
    """Return what happened to a rank that is down or coming back, and how often it has."""
    sentence = f"rank {rank.rank} {cause.message}"
    if rank.restarts == 0:
        return f"{sentence}; it goes on from its last checkpoint"
    return f"{sentence}; restart {rank.restarts} of {snapshot.spec.max_restarts}"
