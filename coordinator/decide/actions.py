"""What `plan` can decide (actions) and what `fold` can learn (observations): two closed unions."""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from coordinator.decide.state.job import GroupSnapshot
from coordinator.decide.state.job_end import JobFailure
from coordinator.decide.state.rank import Cause
from muster.contracts.job.status import JobStatus, Reason, StopRequest
from muster.contracts.messages.agent import (
    AgentHeartbeat,
    CheckpointsListed,
    RankDied,
    RankExited,
    RankSaid,
    RankSpawned,
)
from muster.contracts.messages.logs import LogsDrained


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """Common shape: immutable, named fields only."""


class OfHost(_Value, frozen=True):
    """About the agent of one host."""

    host: str


class OfRank(_Value, frozen=True):
    """About one rank."""

    rank: int


class StartAgent(OfHost, frozen=True):
    """Start the job's next agent on a host."""


class KillAgent(OfHost, frozen=True):
    """Kill an agent that does not respond; its ranks wait for the next one."""


class DismissAgent(OfHost, frozen=True):
    """Tell the agent of a host to exit: the job needs none there."""


class ListCheckpoints(OfHost, frozen=True):
    """Ask an agent what the ranks of a gang have saved."""


class DrainLogs(OfHost, frozen=True):
    """Ask a host, whose ranks have ended, for the last of their logs."""


class LoseHost(OfHost, frozen=True):
    """Give up a host that does not answer, or that other hosts cannot reach.

    Its ranks are started where there is room. Whether they run there is not known. If the agent
    comes back it is dismissed, and ends them.
    """

    why: str  # a sentence


class PlaceRank(OfRank, frozen=True):
    """Choose the host on which the next attempt of a rank is started."""

    host: str


class Start(OfRank, frozen=True):
    """Start the next attempt of a rank."""


class Terminate(OfRank, frozen=True):
    """Ask a rank to save and exit."""


class KillProcess(OfRank, frozen=True):
    """Kill a rank's process and its descendants."""

    cause: Cause


class AddRank(OfRank, frozen=True):
    """Put a rank into service; `plan` then starts it."""


class RemoveRank(OfRank, frozen=True):
    """Take a rank out of service; its worker leaves with the next group round."""


class PublishGroup(_Value, frozen=True):
    """Tell the ranks which workers train together from now on."""

    group: GroupSnapshot


class Suspect(OfRank, frozen=True):
    """Mark a rank whose heartbeat is overdue."""


class ReportSlowExit(OfRank, frozen=True):
    """Say that the process of a rank takes long to exit."""

    limit_seconds: float  # after which it is killed, from when it said that it exits
    limit: str  # the job's field that sets them


class SetStatus(_Value, frozen=True):
    """Change the job's status, reason or message."""

    status: JobStatus
    reason: Reason | None = None
    message: str | None = None


RankAction: TypeAlias = (
    Start | Terminate | KillProcess | Suspect | ReportSlowExit | PlaceRank | RemoveRank
)
AgentAction: TypeAlias = (
    StartAgent | KillAgent | DismissAgent | LoseHost | ListCheckpoints | DrainLogs
)
Action: TypeAlias = AgentAction | RankAction | AddRank | PublishGroup | SetStatus


class ActionTaken(_Value, frozen=True):
    """An action was decided; `fold` notes it so that `plan` does not repeat it."""

    action: Action


class OfAgent(OfHost, frozen=True):
    """About one of the agents that a host has had."""

    agent_number: int


class AgentConnected(OfAgent, frozen=True):
    """An agent said hello with the right token."""


class AgentDisconnected(OfAgent, frozen=True):
    """The connection to an agent broke; its process lives."""


class AgentLost(OfAgent, frozen=True):
    """An agent's process has ended, with everything it had started except the `living` ranks."""

    message: str
    living: frozenset[int] = frozenset()
    newest: int = 0  # the highest number of an agent socket in the job's directory


class AgentNotStarted(AgentLost, frozen=True):
    """Its host was not reached, or has refused to start it."""


class AgentWaits(OfAgent, frozen=True):
    """A scheduler has not started an agent yet."""

    message: str  # why, and since when


class AgentStarved(OfAgent, frozen=True):
    """An agent of this host sends nothing, as no processor was free for it all that time."""

    seconds: float  # since it is late


class AgentSaid(OfHost, frozen=True):
    """An agent reports about itself or its host."""

    message: AgentHeartbeat | CheckpointsListed | LogsDrained


class StopRequested(_Value, frozen=True):
    """A user wants the job to stop."""

    request: StopRequest
    grace_seconds: float


class ChangeRequested(_Value, frozen=True):
    """What users, and hosts that join, want of the job now; the fields of `JobSnapshot`."""

    wanted_world_size: int
    wanted_hosts: Mapping[str, int]
    pause_requested: bool
    checkpoint_requests: int


class LeaveRequested(_Value, frozen=True):
    """A user wants a worker to leave."""

    worker_id: int


class Interrupted(_Value, frozen=True):
    """Ranks save and exit, and the job goes back to the queue: the service shuts down, or `why`."""

    why: str = ""
    grace_seconds: float | None = None
    """None for that of the job."""


class LoopStalled(_Value, frozen=True):
    """The coordinator's event loop stood still; deadlines of others are shifted by that time."""

    seconds: float


class CodeTaken(_Value, frozen=True):
    """The job starts for the first time, or by a person's hand, and takes the code as it is."""

    files: Mapping[str, str]  # digests by path
    script: str = ""


class JobFailed(_Value, frozen=True):
    """Something other than a rank makes the job impossible, such as missing data."""

    failure: JobFailure


Observation: TypeAlias = (
    ActionTaken
    | AgentConnected
    | AgentDisconnected
    | AgentLost
    | AgentWaits
    | AgentStarved
    | AgentSaid
    | StopRequested
    | ChangeRequested
    | LeaveRequested
    | Interrupted
    | LoopStalled
    | CodeTaken
    | JobFailed
    | RankSpawned
    | RankSaid
    | RankDied
    | RankExited
)
