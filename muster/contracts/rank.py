"""The life of one rank's process, as its coordinator sees it.

A *rank* is a place in the job; an *incarnation* is one process that fills it. Incarnations of a
rank count up from 0 and are never used twice, so a frame, a log file and a checkpoint's
generation say which process they come from.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from muster.contracts.errors import IllegalMove


class ProcessState(StrEnum):
    """What is known of the process."""

    SPAWNED = "spawned"
    """It was started and has not said anything yet; the start-up grace runs."""
    LIVE = "live"
    """It beats, or it is a program that does not speak to us and its process exists."""
    SUSPECT = "suspect"
    """A heartbeat is overdue, but the timeout has not passed; a beat makes it live again."""
    EXITED = "exited"
    """Its parent has reaped it; the exit code or signal is recorded."""


TRANSITIONS: Final[Mapping[ProcessState, frozenset[ProcessState]]] = {
    ProcessState.SPAWNED: frozenset({ProcessState.LIVE, ProcessState.EXITED}),
    ProcessState.LIVE: frozenset({ProcessState.SUSPECT, ProcessState.EXITED}),
    ProcessState.SUSPECT: frozenset({ProcessState.LIVE, ProcessState.EXITED}),
    ProcessState.EXITED: frozenset(),
}


def move(current: ProcessState, target: ProcessState) -> ProcessState:
    """Return `target`, or raise `IllegalMove` if the table does not allow it."""
    if target not in TRANSITIONS[current]:
        raise IllegalMove(current, target)
    return target
