"""The process of one rank as its coordinator sees it: its identity and its states.

A *rank* is a place in the job; an *attempt* is one process that fills it. The attempts of a rank
count up from 0 and are never reused, so a message, a log file and a checkpoint's generation say
which process they come from. (Messages and tables call the number `incarnation`.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from muster.contracts.errors import IllegalMove


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """The identity of a process. A pid is reused; pid, start and boot together are not."""

    pid: int
    start_ticks: int  # Field 22 of /proc/PID/stat: clock ticks between boot and its start
    boot_id: str
    node: str


class ProcessState(StrEnum):
    """What the coordinator knows of the process."""

    SPAWNED = "spawned"  # it was started and has sent nothing yet; the start-up grace period runs
    LIVE = "live"  # it sends heartbeats, or it is a program that sends none and its process exists
    SUSPECT = "suspect"
    """A heartbeat is overdue, but the timeout has not passed; a heartbeat makes it live again."""
    EXITED = "exited"  # its parent has reaped it; the exit code or signal is recorded


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
