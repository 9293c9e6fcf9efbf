"""What a row means, once it has left the database: frozen values, times in UTC.

Nobody above this floor sees a table. A `Job` is desired state (what the API wrote: the spec, a
request to stop, the size it is to have) and actual state (what the coordinator made of it) in one
value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

from muster.contracts.job import TERMINAL, JobId, JobStatus, JobUid, StopRequest
from muster.contracts.process import ProcessRecord
from muster.contracts.spec import JobSpec

__all__ = [
    "Audit",
    "Commit",
    "EpochRecord",
    "Event",
    "Incarnation",
    "Job",
    "JobChange",
    "JobWrite",
    "Lease",
    "Member",
    "ProcessRecord",
    "RowVersion",
    "Worker",
]


RowVersion: TypeAlias = tuple[JobUid, int]
"""One state of one job's row, of all that ever were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job."""

    job_id: JobId
    uid: JobUid
    spec: JobSpec
    status: JobStatus
    reason: str | None
    message: str | None
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    exit_code: int | None
    stop_request: StopRequest | None
    stop_grace_seconds: float | None
    """The grace of the request to stop; None: the one of the spec."""
    generation: int
    """Counts the agents this job has had; a stale agent's frames carry a lower one."""
    agent: ProcessRecord | None
    """The last agent started, as long as it is not known to be gone."""
    agent_token_sha256: str | None
    version: int
    """Goes up with every change of the row."""
    # What follows came later: an answer kept under an idempotency key may be without it.
    wanted_world_size: int | None = None
    """What the job was scaled to; None: it never was, and the spec's holds."""
    layout_generation: int = 0
    """Counts the layouts that were announced to the ranks of a synchronous job."""
    master_port: int = 0
    """Where the ranks of a command may meet; that of the agent's generation."""
    pause_request: bool = False
    """No step is to be taken until somebody asks for the job to be resumed."""

    @property
    def world_size(self) -> int:
        """The number of ranks that is wanted now."""
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
        """The status as a person should see it.

        A request to stop counts from the moment it was accepted, whether or not a coordinator
        has acted on it.
        """
        if self.stop_request is not None and not self.is_terminal:
            return JobStatus.STOPPING
        return self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One rank of a job: its present (or last) process, its counters and where it is."""

    rank: int
    incarnation: int
    state: str
    process: ProcessRecord | None
    """The living process; None as soon as it is known to have ended."""
    restarts: int = 0
    """Failures that count against the job's `max_restarts`, over the whole life of the job."""
    failures: int = 0
    """Failures in a row that count for the backoff."""
    finished: bool = False
    """It exited with code 0 and has nothing left to do."""
    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    shard_idx: int = 0
    line_idx: int = 0
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """What else the program gave with its last step."""
    throughput_steps_per_sec: float = 0.0
    checkpoints_saved: int = 0
    checkpoints_before: int = 0
    """Those of them that earlier incarnations have saved."""
    last_checkpoint_step: int | None = None
    last_heartbeat_at: datetime | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    endings: dict[str, int] = field(default_factory=dict)
    """How often its incarnations ended in each `muster.contracts.endings.RetryClass`."""
    fruitless: int = 0
    """Failures in a row without a new checkpoint."""
    proven_step: int = -1
    """The newest checkpoint at the last of them."""

    @property
    def worker_id(self) -> str:
        """Which process of which rank this is; the rank alone before its first one."""
        return f"{self.rank}" if self.incarnation < 0 else f"{self.rank}.{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """One process of one rank. All about its end is None while it lives."""

    rank: int
    incarnation: int
    pid: int | None
    """None until it is known; kept when the process is gone."""
    started_at: datetime
    ended_at: datetime | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    retry_class: str | None = None
    """The word of `muster.contracts.endings.RetryClass`."""
    reason: str | None = None
    message: str | None = None
    """A verb phrase, with the last line of its log where that says why."""
    step_at_start: int | None = None
    """None where it is not known."""
    step_at_end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker of a synchronous job's pool: one incarnation of one rank, living or gone."""

    worker_id: int
    """Counts up from 0 in each job; never used twice."""
    rank: int
    incarnation: int
    state: str
    """The pool's word: syncing, active, draining, failed or left."""
    node: str | None
    gpu_count: int = 0
    backend: str | None = None
    """How it talks to its peers; None while that is not settled."""
    joined_at: datetime
    joined_step: int | None = None
    """The step before which it became active; None before that."""
    last_heartbeat_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A durable checkpoint of all ranks of a synchronous job together."""

    step: int
    generation: int
    """That of the layout which saved it."""
    epoch: int
    digest: str
    """Of state and position, in hex: equal bits, equal digits."""
    consumed: int
    """Samples of this epoch whose steps are in the checkpoint."""
    consumed_hash: int
    """The sum of their lines' hashes, modulo 2**64."""
    saved_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One pass over the data: what was read and committed of it, and what is in the data set."""

    epoch: int
    samples: int
    hash_sum: int
    """Sums of the lines' hashes are modulo 2**64."""
    expected_samples: int
    expected_hash_sum: int

    @property
    def exactly_once(self) -> bool | None:
        """Whether every sample was read, and once; None while some may still be to come."""
        if self.samples < self.expected_samples:
            return None
        return (self.samples, self.hash_sum) == (self.expected_samples, self.expected_hash_sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What there is to prove that a job read every sample exactly once."""

    commits: Sequence[Commit]
    """The last ones, the newest last."""
    epochs: Sequence[EpochRecord]
    """The last ones, the newest last."""
    exact: int
    """How many epochs were read exactly once, of all."""
    inexact: int
    """How many were not; neither counts those that are still being read."""
    epochs_omitted: int = 0
    """How many are on record before those that are here."""
    commits_omitted: int = 0
    """The same of commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a job, in one sentence."""

    at: datetime
    kind: str
    """A past participle, such as ``submitted``, ``rank_exited``, ``checkpoint_rejected``."""
    message: str
    rank: int | None = None
    incarnation: int | None = None
    actor: str | None = None
    """Who asked for it, such as ``uid:1000`` or ``token:ci``; None: nobody from outside."""
    event_id: int | None = None
    """Its place in the order of events; None until it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """New values for a job's row; what is not in `JobChange` only the API writes."""

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

    A row of a worker, an incarnation, a member, a commit or an epoch replaces the one with the same
    key; of an incarnation it is kept when and where it began, and its pid. Events are added.
    """

    change: JobChange
    """Says which job this is, whether or not its row changes."""
    workers: Sequence[Worker] = ()
    incarnations: Sequence[Incarnation] = ()
    members: Sequence[Member] = ()
    commits: Sequence[Commit] = ()
    epochs: Sequence[EpochRecord] = ()
    events: Sequence[Event] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to decide for all jobs of a database, held by one coordinator at a time."""

    name: str
    epoch: int
    """The fencing token: goes up with every new holder."""
    beat: int
    """Goes up with every renewal; a watcher measures on its own monotonic clock how long it has
    stood still."""
    owner: str
    """Unique per coordinator process."""
    process: ProcessRecord
    address: str
    """host:port where agents find the holder."""
