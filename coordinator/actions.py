"""What `plan` can decide: a closed union of values.

The supervisor performs them; `fold` notes that they were taken.
"""

from dataclasses import dataclass
from typing import TypeAlias

from coordinator.snapshot import Cause, LayoutSnapshot
from muster.contracts.job import JobStatus, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgent:
    """Start the job's agent, under a new generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAgent:
    """End an agent that does not do its part; its ranks wait for the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissAgent:
    """Tell the agent that nothing is left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the next incarnation of a rank."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Ask a rank to save and exit."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillProcess:
    """End a rank's process and all it started, for a reason."""

    rank: int
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Enlist:
    """Put a rank into service: it is to have a process."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Take a rank out of service: its worker leaves with the next layout."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell the ranks who trains together from now on."""

    layout: LayoutSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A heartbeat is overdue."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Give the job another status, or another reason for the same one."""

    status: JobStatus
    reason: Reason | None = None
    message: str | None = None


RankAction: TypeAlias = Start | Terminate | KillProcess | Suspect
PoolAction: TypeAlias = Enlist | Retire | Announce
Action: TypeAlias = StartAgent | KillAgent | DismissAgent | Move | PoolAction | RankAction
