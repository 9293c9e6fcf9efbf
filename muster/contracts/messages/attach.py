"""What a coordinator and `worker.attach` on another host say to each other: JSON, one line each.

The coordinator gives one order once the host has said that it is ready. A line that ends without an
answer is evidence of nothing.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, TypeAlias

import msgspec

from muster.contracts.host import HostFacts
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.messages.logs import Kind, LogPart, Rank
from muster.contracts.rank import Count, ProcessRecord

REPEAT_SECONDS: Final = 10.0
"""How often `AgentRuns` is repeated, so that each side notices when the other one is gone."""


class ProbeFile(msgspec.Struct, frozen=True, kw_only=True):
    """A new file that only a host which shares the coordinator's directory can read."""

    directory: str
    name: str
    content: str


class LaunchAgent(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    """Start an agent, and watch it."""

    assignment: AgentAssignment
    environment: dict[str, str] = {}  # on top of that of the host
    coordinator_file: tuple[int, int] | None = None
    """Inode and modification time (ns) of the job's `uid` file on the coordinator's host.
    Agents of two hosts in one directory would take each other for successors."""
    probe: ProbeFile | None = None  # of the directory of checkpoints, which hosts may share


JOIN_ORDER: Final = "MUSTER_JOIN_ORDER"
"""The variable of a `JoinOrder`."""


class JoinOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Fetch the assignment of an agent from the coordinator, and become its parent.

    The token is good for one process.
    """

    job_uid: str
    host: str
    agent_number: int
    token: str
    coordinator: CoordinatorAddress | None  # None for an agent on its host, which does not join


class JoinExit(IntEnum):
    """Exit codes of `worker.join`, by which a scheduler tells why an agent has ended."""

    AGENT_DIED = 1
    NO_ROUTE = 72
    REFUSED = 73


JOIN_EXITS: Final[Mapping[int, str]] = {
    JoinExit.AGENT_DIED: "its agent died",
    JoinExit.NO_ROUTE: "it reached no coordinator at MUSTER_AGENT_ADDRESS: open that port",
    JoinExit.REFUSED: "the coordinator did not expect it any more",
    127: "its node does not have the Python that runs the coordinator, at the same path",
}


class WatchAgent(msgspec.Struct, frozen=True, kw_only=True, tag="watch"):
    """Say that the job's agent runs until it has ended."""

    job_uid: str
    process: ProcessRecord | None  # None if it is known by the job alone
    kills: bool = False  # end it first
    coordinator: CoordinatorAddress | None = None  # to be written into the host's address file
    data_dir: str = ""


class CleanHost(msgspec.Struct, frozen=True, kw_only=True, tag="clean"):
    """End every process of a job, and the `known` ones, which may have lost their tag."""

    job_uid: str
    known: tuple[ProcessRecord, ...]


class ProbeHost(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Say what the host has."""

    environment: dict[str, str] = {}  # that agents would get
    probe: ProbeFile | None = None
    data_dir: str = ""  # where agents would write
    coordinator_file: tuple[int, int] | None = None  # as of `LaunchAgent`, of the address file
    deleted: tuple[str, ...] = ()
    """The uids of jobs whose directories are to be removed, unless a process of the job runs."""


class FetchLogs(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Send what the coordinator does not have of an ended job's logs.

    The job's directory is removed once `LogsKept` follows.
    """

    job_uid: str
    data_dir: str
    coordinator_file: tuple[int, int] | None  # as of `LaunchAgent`
    sizes: tuple[tuple[Rank, Count, Kind, Count], ...]  # what the coordinator has


class LogsKept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """Everything that was sent lies on the coordinator's disk."""


Order: TypeAlias = LaunchAgent | WatchAgent | CleanHost | ProbeHost | FetchLogs


class HostReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The host takes an order. Nothing of one is done before this was said."""

    version: str  # of Muster there


class AgentRuns(msgspec.Struct, frozen=True, kw_only=True, tag="running"):
    process: ProcessRecord


class AgentEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    status: int | None = None  # None if the agent was started by another process


class HostClean(msgspec.Struct, frozen=True, kw_only=True, tag="clean"):
    left: int  # processes and cgroups that hang in the kernel


class HostProbed(msgspec.Struct, frozen=True, kw_only=True, tag="probed"):
    facts: HostFacts | None = None  # None: of a scheduler
    clock: float = 0.0  # seconds since the epoch
    is_shared: bool = False  # the directory of the probe file
    refusal: str = ""  # why no agent can be started there
    jobs: tuple[str, ...] = ()  # the uids of those that have a directory there


class LogFetched(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    part: LogPart


class LogsFetched(msgspec.Struct, frozen=True, kw_only=True, tag="logs"):
    """Nothing is left to send."""


class OrderFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    message: str


Answer: TypeAlias = (
    HostReady
    | AgentRuns
    | AgentEnded
    | HostClean
    | HostProbed
    | LogFetched
    | LogsFetched
    | OrderFailed
)
