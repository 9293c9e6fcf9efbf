"""What `plan` can decide (actions) and what `fold` can learn (observations): two closed unions."""

from dataclasses import dataclass
from typing import TypeAlias

from coordinator.decide.state import Cause, GroupSnapshot, JobFailure
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import AgentHeartbeat, RankExited, RankSaid, RankSpawned


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgent:
    """Start the job's next agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAgent:
    """Kill an agent that does not respond; its ranks wait for the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissAgent:
    """Tell the agent to exit: the job needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the next attempt of a rank."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Ask a rank to save and exit."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillProcess:
    """Kill a rank's process and its descendants."""

    rank: int
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRank:
    """Put a rank into service; `plan` then starts it."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveRank:
    """Take a rank out of service; its worker leaves with the next group round."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishGroup:
    """Tell the ranks which workers train together from now on."""

    group: GroupSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Mark a rank whose heartbeat is overdue."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStatus:
    """Change the job's status, reason or message."""

    status: JobStatus
    reason: Reason | None = None
    message: str | None = None


RankAction: TypeAlias = Start | Terminate | KillProcess | Suspect
PoolAction: TypeAlias = AddRank | RemoveRank | PublishGroup
Action: TypeAlias = StartAgent | KillAgent | DismissAgent | SetStatus | PoolAction | RankAction


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTaken:
    """An action was decided; `fold` notes it so that `plan` does not repeat it."""

    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnected:
    """The agent said hello with the right token."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDisconnected:
    """The connection to the agent broke; its process lives."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """The agent's process has ended, with everything it had started except the `living` ranks."""

    generation: int
    message: str
    living: frozenset[int] = frozenset()
    newest: int = 0  # the highest number of an agent socket in the job's directory


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """A user wants the job to stop."""

    request: StopRequest
    grace_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested:
    """A user wants another number of ranks."""

    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """A user wants the job to pause, or to resume."""

    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """A user wants a worker to leave."""

    worker_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The service shuts down: ranks save and exit, the job goes back to the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStalled:
    """The coordinator's event loop stood still; deadlines of others are shifted by that time."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """Something other than a rank makes the job impossible, such as missing data."""

    failure: JobFailure


Observation: TypeAlias = (
    ActionTaken
    | AgentConnected
    | AgentDisconnected
    | AgentLost
    | StopRequested
    | ScaleRequested
    | PauseRequested
    | LeaveRequested
    | Interrupted
    | LoopStalled
    | JobFailed
    | AgentHeartbeat
    | RankSpawned
    | RankSaid
    | RankExited
)
