"""Rows as frozen values. All times are aware and in UTC.

A `Job` holds the desired state, written by the API (the spec, a request to stop, the wanted size),
and the actual state, written by the coordinator.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from muster.contracts.agent import UNPLACED, AgentState
from muster.contracts.host import HostFacts
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import TERMINAL, JobId, JobStatus, JobUid, StopRequest
from muster.contracts.messages.rank import EpochDone
from muster.contracts.rank import NO_PROGRESS, ProcessRecord, RankProgress
from muster.contracts.series import Point
from muster.contracts.views.history import AttemptView, CheckpointView, EventView, FaultView
from muster.contracts.views.service import EngineSweep

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Clock: TypeAlias = Callable[[], datetime]  # returns the time as an aware value in UTC

RowVersion: TypeAlias = tuple[JobUid, int]  # identifies one state of one job's row

# Rows that hold just what the API shows of them.
Attempt: TypeAlias = AttemptView
Event: TypeAlias = EventView


def utc_now() -> datetime:
    """Return the system's time, to be shown; no decision compares two machines' clocks."""
    return datetime.now(UTC)


def values_of(record: "DataclassInstance | msgspec.Struct") -> dict[str, Any]:
    """Return the fields of `record` by the names of their columns."""
    if isinstance(record, msgspec.Struct):
        return msgspec.structs.asdict(record)
    return {field.name: getattr(record, field.name) for field in fields(record)}


class HostRanks(NamedTuple):
    """How many ranks of a job each host has."""

    running: Counter[str]
    down: Counter[str]  # they are to restart there


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job. A field that is added later needs a default: stored answers lack it."""

    job_id: JobId
    uid: JobUid
    spec: JobSpec
    status: JobStatus
    reason: str | None = None
    message: str | None = None
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    exit_code: int | None = None
    stop_request: StopRequest | None = None
    stop_grace_seconds: float | None = None
    """Grace period of the stop request; None: the one in the spec."""
    version: int = 1  # incremented by every change of the row
    wanted_world_size: int | None = None
    """What the job was last scaled to; None: never scaled, the spec's size holds."""
    wanted_hosts: dict[str, int] = field(default_factory=dict)
    """By host: how many ranks should be there at least, because it asked to join."""
    group_round: int = 0
    """Counts the group rounds published to the ranks of a synchronous job."""
    master_port: int = 0  # MASTER_PORT of a command's ranks
    restore_from: str | None = None  # from where the present attempts of a gang go on
    pause_request: bool = False  # True: take no step until the job is resumed
    checkpoint_requests: int = 0  # how often a checkpoint was requested
    checkpoint_requests_done: int = 0  # how many of them are durable; the coordinator writes it
    exporter: int | None = None  # after the loop, the rank for which the job waits
    numeric_environment: dict[str, dict[str, str]] | None = None
    """By host: the variables with which all hosts of the job compute the same bits, chosen before
    its first rank and for good; None before. Of a host that came later there are none."""

    faults: tuple[FaultView, ...] = ()  # the last ones that were requested, in their order

    @property
    def world_size(self) -> int:
        """The number of ranks wanted now."""
        wanted = self.wanted_world_size
        return self.spec.world_size if wanted is None else wanted

    def expected_on(self, host: str, ranks: HostRanks) -> int:
        """Return how many ranks run on a host or are about to."""
        running = ranks.running
        # A host that was lost has fewer than it wanted for good: its ranks run elsewhere.
        starting = max(self.world_size - running.total(), 0)
        missing = max(self.wanted_hosts.get(host, 0) - running[host], ranks.down[host])
        return running[host] + min(starting, max(missing, 0))

    @property
    def is_checkpoint_pending(self) -> bool:
        """True if a checkpoint was requested that is not durable yet."""
        return self.checkpoint_requests > self.checkpoint_requests_done and not self.is_terminal

    @property
    def row_version(self) -> RowVersion:
        return self.uid, self.version

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def status_shown(self) -> JobStatus:
        """The status to show: STOPPING as soon as a stop request was accepted."""
        if self.stop_request is not None and not self.is_terminal:
            return JobStatus.STOPPING
        return self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """The present or last agent of a job on one host."""

    host: str
    agent_number: int  # counts the agents of this host; frames of a stale one carry a lower number
    state: AgentState = AgentState.ABSENT
    process: ProcessRecord | None = None  # None once it is known to have exited
    token_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """What a host has last said about itself."""

    host: str
    facts: HostFacts | None = None  # None until it has answered
    seen_at: datetime | None = None  # when it did last
    problem: str | None = None  # why it has not answered since, or starts no agent
    shared_dir: str | None = None  # proven to be the same directory as on the coordinator's host
    sweep: EngineSweep | None = None  # of a scheduler
    sweep_request: EngineSweep | None = None  # the last one; the API writes it alone

    @property
    def is_sweep_due(self) -> bool:
        asked, done = self.sweep_request, self.sweep
        return asked is not None and (done is None or done.number < asked.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank of a job: its current or last attempt, its counters and its progress."""

    rank: int
    host: str = UNPLACED
    attempt: int
    state: str
    process: ProcessRecord | None  # the running process; None once it is known to have exited
    restarts: int = 0  # failures counted against the job's `max_restarts`, over its whole life
    failures: int = 0  # consecutive failures, for the backoff
    finished: bool = False  # True: it exited with code 0 and has nothing left to do
    in_service: bool = True  # False: the job was scaled down and has left it out
    progress: RankProgress = NO_PROGRESS
    throughput_steps_per_sec: float = 0.0
    checkpoints_saved: int = 0
    checkpoints_before: int = 0  # how many of them earlier attempts saved
    last_heartbeat_at: datetime | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    endings: dict[str, int] = field(default_factory=dict)
    """How often its attempts ended in each `muster.contracts.job.retry.RetryClass`."""
    fruitless: int = 0  # consecutive failures without progress
    proven_step: int = -1  # how far the job had got at the last of those failures


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A worker of a synchronous job's pool: one attempt of one rank, past or present."""

    worker_id: int  # counts up from 0 in each job; never reused
    rank: int
    attempt: int
    state: str  # a `muster.contracts.pool.WorkerState`
    node: str | None
    gpu_count: int = 0
    backend: str | None = None  # the type of its device
    transport: str | None = None
    joined_at: datetime
    joined_step: int | None = None  # the first step it took part in; None until it is active
    last_heartbeat_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord(RankRecord):
    """A rank, and what its attempt is in the job's pool. No table holds it."""

    member: MemberRecord | None = None


class CheckpointRecord(CheckpointView, frozen=True, kw_only=True):
    """A durable checkpoint of all ranks of a synchronous job together."""

    consumed: int  # samples of this epoch contained in the checkpoint
    consumed_hash: int  # the sum of their hashes, modulo 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The evidence that a job read every sample exactly once."""

    commits: Sequence[CheckpointRecord]  # the last ones, newest last
    epochs: Sequence[EpochDone]  # the last ones, newest last
    exact: int  # number of epochs read exactly once
    inexact: int  # number of epochs that were not; epochs still being read count in neither
    epochs_omitted: int = 0  # number of older epochs on record that are left out here
    commits_omitted: int = 0  # the same for commits


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """New values for the columns of a job's row that a coordinator writes."""

    job_id: JobId
    uid: JobUid
    status: JobStatus
    reason: str | None
    message: str | None
    started_at: datetime | None
    finished_at: datetime | None
    exit_code: int | None
    group_round: int = 0
    master_port: int = 0
    restore_from: str | None = None
    checkpoint_requests_done: int = 0
    exporter: int | None = None
    numeric_environment: dict[str, dict[str, str]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWrite:
    """Everything a coordinator writes about one job in one transaction.

    Events are appended. Every other row replaces the one with the same key, except that an attempt
    keeps its pid, start time and first step once they are known.
    """

    change: JobChange  # names the job, whether or not its row changes
    agents: Sequence[AgentRecord] = ()
    ranks: Sequence[RankRecord] = ()
    attempts: Sequence[Attempt] = ()
    members: Sequence[MemberRecord] = ()
    commits: Sequence[CheckpointRecord] = ()
    epochs: Sequence[EpochDone] = ()
    series: Sequence[Point] = ()
    series_due: frozenset[str] = frozenset()  # names that may have too many points now
    events: Sequence[Event] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to decide for all jobs of a database, held by one coordinator at a time."""

    name: str
    epoch: int  # the fencing token: incremented with every new holder
    beat: int
    """Incremented with every renewal. A watcher measures on its own monotonic clock how long it has
    not changed."""
    owner: str  # unique per coordinator process
    process: ProcessRecord
    address: str  # host:port on which the holder listens for agents
