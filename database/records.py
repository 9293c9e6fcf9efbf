"""Rows as frozen values. All times are aware and in UTC.

A `Job` holds the desired state, written by the API (the spec, a request to stop, the wanted size),
and the actual state, written by the coordinator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from muster.contracts.job import TERMINAL, JobId, JobStatus, JobUid, StopRequest
from muster.contracts.rank import NO_PROGRESS, ProcessRecord, RankProgress
from muster.contracts.spec import JobSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Clock: TypeAlias = Callable[[], datetime]  # returns the time as an aware value in UTC

RowVersion: TypeAlias = tuple[JobUid, int]  # identifies one state of one job's row


def utc_now() -> datetime:
    """Return the system's time, to be shown; no decision compares two machines' clocks."""
    return datetime.now(UTC)


def values_of(record: "DataclassInstance") -> dict[str, Any]:
    """Return the fields of `record` by the names of their columns."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job."""

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
    generation: int = 0  # counts the job's agents; frames of a stale agent carry a lower number
    agent: ProcessRecord | None = None
    """The last agent started; None once it is known to have exited."""
    agent_token_sha256: str | None = None
    version: int = 1  # incremented by every change of the row
    # A stored idempotent response of an earlier release may lack these fields.
    wanted_world_size: int | None = None
    """What the job was last scaled to; None: never scaled, the spec's size holds."""
    layout_generation: int = 0
    """Counts the group rounds published to the ranks of a synchronous job."""
    master_port: int = 0  # MASTER_PORT of a command's ranks; belongs to the agent's generation
    pause_request: bool = False  # True: take no step until the job is resumed

    @property
    def world_size(self) -> int:
        """The number of ranks wanted now."""
        wanted = self.wanted_world_size
        return self.spec.world_size if wanted is None else wanted

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
class RankRecord:
    """One rank of a job: its current or last attempt, its counters and its progress."""

    rank: int
    incarnation: int
    state: str
    process: ProcessRecord | None  # the running process; None once it is known to have exited
    restarts: int = 0  # failures counted against the job's `max_restarts`, over its whole life
    failures: int = 0  # consecutive failures, for the backoff
    finished: bool = False  # True: it exited with code 0 and has nothing left to do
    progress: RankProgress = NO_PROGRESS
    throughput_steps_per_sec: float = 0.0
    checkpoints_saved: int = 0
    checkpoints_before: int = 0  # how many of them earlier attempts saved
    last_heartbeat_at: datetime | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    endings: dict[str, int] = field(default_factory=dict)
    """How often its attempts ended in each `muster.contracts.retry.RetryClass`."""
    fruitless: int = 0  # consecutive failures without a new checkpoint
    proven_step: int = -1  # step of the newest checkpoint at the last of those failures

    @property
    def worker_id(self) -> str:
        """``rank.attempt``, or the rank alone before its first attempt."""
        return f"{self.rank}" if self.incarnation < 0 else f"{self.rank}.{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One process of one rank. The fields about its end are None while it runs."""

    rank: int
    incarnation: int
    pid: int | None  # None until it is known; kept after the process has exited
    started_at: datetime
    ended_at: datetime | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    retry_class: str | None = None  # a value of `muster.contracts.retry.RetryClass`
    reason: str | None = None
    message: str | None = None
    """A verb phrase, with the last line of its log if that gives the reason."""
    step_at_start: int | None = None  # None if unknown
    step_at_end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A worker of a synchronous job's pool: one attempt of one rank, past or present."""

    worker_id: int  # counts up from 0 in each job; never reused
    rank: int
    incarnation: int
    state: str  # a `muster.contracts.pool.WorkerState`
    node: str | None
    gpu_count: int = 0
    backend: str | None = None  # the collective backend it uses; None until that is settled
    joined_at: datetime
    joined_step: int | None = None  # the first step it took part in; None until it is active
    last_heartbeat_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A durable checkpoint of all ranks of a synchronous job together."""

    step: int
    generation: int  # the group round that saved it
    epoch: int
    digest: str  # hash of state and data position, in hex
    consumed: int  # samples of this epoch contained in the checkpoint
    consumed_hash: int  # the sum of their hashes, modulo 2**64
    saved_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One pass over the data: samples read and committed, and samples in the data set."""

    epoch: int
    samples: int
    hash_sum: int  # sums of the samples' hashes are modulo 2**64
    expected_samples: int
    expected_hash_sum: int

    @property
    def exactly_once(self) -> bool | None:
        """Whether every sample was read exactly once; None while samples are missing."""
        if self.samples < self.expected_samples:
            return None
        return (self.samples, self.hash_sum) == (self.expected_samples, self.expected_hash_sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The evidence that a job read every sample exactly once."""

    commits: Sequence[CheckpointRecord]  # the last ones, newest last
    epochs: Sequence[EpochRecord]  # the last ones, newest last
    exact: int  # number of epochs read exactly once
    inexact: int  # number of epochs that were not; epochs still being read count in neither
    epochs_omitted: int = 0  # number of older epochs on record that are left out here
    commits_omitted: int = 0  # the same for commits


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One entry of a job's history."""

    at: datetime
    kind: str  # a past participle, such as ``submitted``, ``rank_exited``, ``checkpoint_rejected``
    message: str
    rank: int | None = None
    incarnation: int | None = None
    actor: str | None = None
    """The caller who caused it, such as ``uid:1000`` or ``token:ci``; None: Muster itself."""
    event_id: int | None = None  # position in the order of events; None until it is stored


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
    generation: int
    layout_generation: int = 0
    agent: ProcessRecord | None
    agent_token_sha256: str | None
    master_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWrite:
    """Everything a coordinator writes about one job in one transaction.

    Events are appended. Every other row replaces the one with the same key, except that an attempt
    keeps its pid, start time and first step once they are known.
    """

    change: JobChange  # names the job, whether or not its row changes
    ranks: Sequence[RankRecord] = ()
    attempts: Sequence[Attempt] = ()
    members: Sequence[MemberRecord] = ()
    commits: Sequence[CheckpointRecord] = ()
    epochs: Sequence[EpochRecord] = ()
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
