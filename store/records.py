"""What a row means, once it has left the database: frozen values, times in UTC.

Nobody above this floor sees a table. A `Job` is desired state (what the API wrote: the spec, a
request to stop) and actual state (what the coordinator made of it) in one value.
"""

from dataclasses import dataclass, field
from datetime import datetime

from muster.contracts.job import TERMINAL, JobId, JobStatus, JobUid, StopRequest
from muster.contracts.process import ProcessRecord
from muster.contracts.spec import JobSpec

__all__ = ["Event", "Job", "JobChange", "Lease", "ProcessRecord", "Worker"]


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
    last_checkpoint_step: int | None = None
    last_heartbeat_at: datetime | None = None
    exit_code: int | None = None
    exit_signal: int | None = None

    @property
    def worker_id(self) -> str:
        return f"{self.rank}.{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a job, in one sentence."""

    at: datetime
    kind: str
    """A past participle, such as ``submitted``, ``rank_exited``, ``checkpoint_rejected``."""
    message: str
    rank: int | None = None
    incarnation: int | None = None
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
    agent: ProcessRecord | None
    agent_token_sha256: str | None


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
